"""Collectives and slices of several chips, and estimates next to what a real run recorded."""

import json
import shutil
from pathlib import Path

import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.cli.tpu_estimate import main as command
from vitkernels.runtime import xla
from vitkernels.tpu_estimate import against, collectives, compiler, record_step
from vitkernels.tpu_estimate.chips import CHIPS

RUN = Path(__file__).resolve().parents[1] / "golden/run_folder"
needs_both = pytest.mark.skipif(
    compiler.unavailable() is not None or xla.unavailable() is not None,
    reason=f"{compiler.unavailable()} {xla.unavailable()}",
)


def document(**changes) -> dict:
    step = {"estimate_ms": 100.0, "estimate_ms_of_parts": {"optimizer": 8.0}}
    found = {
        "chip": "v5e",
        "settings": ["model=x"],
        "batch": 128,
        "parameters": 90_000_000,
        "step": step,
        "kernels": [],
    }
    return found | changes


def test_collective__corner_chip_is_limited_by_its_links():
    half = 1e9 / 2 / 4.5e10 * 1e3  # ms for half of 1 GB through one link
    assert collectives.collective_ms("all-gather", 1e9, (2,)) == pytest.approx(half + 1e-3)
    assert collectives.collective_ms("all-gather", 1e9, (2, 2)) == pytest.approx(1.5 * half / 2 + 2e-3)
    assert collectives.collective_ms("reduce-scatter", 1e9, (2, 2, 1)) == pytest.approx(1.5 * half / 2 + 2e-3)
    twice = 2 * collectives.collective_ms("all-gather", 1e9, (4, 4))
    assert collectives.collective_ms("all-reduce", 1e9, (4, 4)) == pytest.approx(twice)
    assert collectives.collective_ms("all-reduce", 1e9, (1,)) == 0
    faster = collectives.collective_ms("all-gather", 1e9, (2, 2), CHIPS["v6e"])
    assert faster == pytest.approx(1.5 * half / 4 + 2e-3)


def test_published_collectives__are_lower_bounds():
    """The estimate takes the published bandwidth in full; large messages reach 0.83 to 0.96 of it, small ones less."""
    ratios = [round(case.ratio, 2) for case in collectives.PUBLISHED]
    assert ratios == [0.83, 0.65, 0.95, 0.75, 0.96, 0.72]


def test_scaling__ddp_reduces_and_fsdp_gathers_twice():
    rows = collectives.scaling(document(), [4, 16], ["ddp", "fsdp"])
    assert [(row["strategy"], row["chips"]) for row in rows] == [("ddp", 4), ("ddp", 16), ("fsdp", 4), ("fsdp", 16)]
    size = 2 * 90_000_000
    assert rows[0]["estimate_communication_ms"] == collectives.collective_ms("all-reduce", size, (2, 2))
    assert rows[2]["estimate_communication_ms"] == pytest.approx(
        3 * collectives.collective_ms("all-gather", size, (2, 2))
    )
    assert rows[0]["estimate_compute_ms"] == 100 and rows[2]["estimate_compute_ms"] == 100 - 8 * 3 / 4
    for row in rows:
        assert row["estimate_ms"] == row["estimate_compute_ms"] + row["estimate_communication_ms"]
        assert row["estimate_ms_overlapped"] == max(row["estimate_compute_ms"], row["estimate_communication_ms"])
        assert row["estimate_images_per_s"] == pytest.approx(128 * row["chips"] / row["estimate_ms"] * 1e3)


def test_command__scaling_of_a_file(tmp_path, capsys):
    (tmp_path / "a.json").write_text(json.dumps(document()))
    assert command(["scaling", str(tmp_path / "a.json"), "--chips", "8", "--strategies", "fsdp"]) == 0
    printed = capsys.readouterr().out
    assert "| v5e × 8 | fsdp |" in printed and "ESTIMATE" in printed and "scaling-book" in printed
    for words in (["--chips", "5"], ["--chips", "four"], ["--strategies", "tp"]):
        assert command(["scaling", str(tmp_path / "a.json"), *words]) == 2
        assert capsys.readouterr().err.startswith("error: ")


@pytest.fixture
def run(tmp_path) -> Path:
    """A run's folder as a TPU v5e would have left it."""
    for name in ("summary.json", "config.json"):
        shutil.copy(RUN / name, tmp_path)
    change(tmp_path, runtime="xla", device="TPU v5e")
    return tmp_path


def change(folder: Path, **figures) -> None:
    path = folder / "summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | figures))


def test_against__reads_times_and_settings(run):
    found = against.read(run)
    assert (found.chip.name, found.devices, found.step_ms["median"]) == ("v5e", 1, 7.8154)
    cfg = record_step.compose(tuple(found.overrides))
    assert (cfg.model.name, cfg.model.kwargs["depth"], cfg.data.batch_size) == ("vit_digits", 2, 16)
    assert (cfg.attn.name, cfg.optim.opt, cfg.ema.decay) == ("native", "adamw", 0.9)


@pytest.mark.parametrize(
    ("figures", "code"),
    [
        ({"runtime": "cpu", "device": "CPU, 1 threads"}, "tpu_estimate.not_on_tpu"),
        ({"device": "XLA:CPU"}, "tpu_estimate.not_on_tpu"),
        ({"device": "TPU v4"}, "tpu_estimate.not_on_tpu"),
        ({"step_time_ms": {"median": None, "n": 0}}, "tpu_estimate.no_times"),
    ],
)
def test_against__refuses_runs_without_times_on_a_tpu(run, figures, code, capsys):
    change(run, **figures)
    with error(code):
        against.read(run)
    assert command(["--against", str(run)]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_against__refuses_a_folder_without_a_run(tmp_path):
    with error("tpu_estimate.no_run"):
        against.read(tmp_path)


@needs_both
@pytest.mark.slow
def test_command__against_a_run(run, capsys):
    change(run, devices=4, parallel="ddp")
    assert command(["--against", str(run)]) == 0
    printed = capsys.readouterr().out
    assert "measured       7.82 ms" in printed and "of collectives" in printed and "4 × TPU v5e" in printed
