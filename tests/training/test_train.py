"""train.py end to end: losses per backend, options, the run folder and its figures."""

import json
import time

import pytest
import torch
from expecting import error
from quick_xla import QUICK_XLA
from small_runs import RICH, ROOT, SMALL, finish, start

import train
from vitkernels import attention
from vitkernels.training.step_timer import PARTS

GOLDEN = json.loads((ROOT / "tests/golden/losses.json").read_text())


@pytest.mark.parametrize(
    "attn",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "triton_flash" else name
        for name in attention.names()
        if name != "auto"
    ],
)
def test_attention_backend__gives_the_losses_of_the_reference(attn, settings, losses, tmp_path):
    """Train five steps and compare with the stored losses of the reference.

    Each backend sums in its own order: about 1e-7 per product, which five AdamW steps amplify to about 1e-5.
    """
    cfg = settings(*SMALL, f"attn={attn}", "trainer.max_steps=5", "trainer.eval_every=null")
    reason = attention.get(attn).unavailable()
    if reason is not None:
        pytest.skip(reason)
    train.run(cfg, tmp_path)
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)


def test_fused_ops__give_the_losses_of_the_reference(settings, losses, tmp_path):
    """Every op by the project's own kernels, interpreted: the same losses, within the same tolerance."""
    pytest.importorskip("triton", reason="no Triton on this platform")
    train.run(settings(*SMALL, "attn=native", "ops=fused", "trainer.max_steps=5", "trainer.eval_every=null"), tmp_path)
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)


def test_run_folder__is_complete_and_evaluates_and_is_not_overwritten(settings, losses, tmp_path):
    train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {
        "attn": "native",
        "ops": "auto",
        "runtime": "cpu",
        "steps": 12,
        "seed": 0,
        "mfu": None,
        "status": "done",
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["step_time_ms"]["n"] == 10 and summary["step_time_ms"]["median"] > 0
    parts = [summary[name] for name in PARTS]
    assert sum(parts) == pytest.approx(summary["step_time_ms"]["mean"], abs=0.01) and min(parts) >= 0
    assert summary["images_per_s"] == pytest.approx(16e3 / summary["step_time_ms"]["mean"], rel=1e-3)
    for key in (
        "device",
        "versions",
        "input_wait_ms",
        "host_late_ms",
        "device_busy_ms",
        "rest_ms",
        "peak_memory_bytes",
        "train_loss",
        "val_top1",
        "val_top5",
        "epochs",
    ):
        assert summary[key] is not None, key
    assert list(losses(tmp_path)) == list(range(1, 13))
    names = {path.name.split(".")[0] for path in tmp_path.iterdir()}
    assert {"checkpoints", "summary", "metrics", "model", "events", "config"} <= names
    scalars = read_board(tmp_path)
    for tag in (
        "train/loss",
        "train/lr",
        "train/grad_norm",
        "time/step_ms",
        "time/images_per_s",
        *(f"time/{part}" for part in PARTS),
    ):
        assert tag in scalars, tag
    assert {"val/top1", "val/top5"} <= set(scalars)
    groups = sorted({tag.split("/")[0] for tag in scalars})  # TensorBoard's order
    assert groups[0] == "curves" and groups[-2:] == ["z_memory", "z_result"]

    # The exported weights and the best checkpoint evaluate to the same figures.
    for weights in ("model.safetensors", "checkpoints/best", "best.safetensors"):
        cfg = settings(*SMALL, "attn=sdpa", "mode=eval", f"checkpoint={tmp_path / weights}")
        train.run(cfg, tmp_path / "eval")
        result = json.loads((tmp_path / "eval" / "eval.json").read_text())
        assert result["top1"] == pytest.approx(summary["val_top1"]) and result["images"] == 360

    # A second run must not overwrite it. Resuming the complete run changes nothing.
    with error("run.folder_taken"):
        train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12"), tmp_path)
    train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12", "resume=auto"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def read_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return board.Tags()["scalars"]


def test_profile__skipped_if_the_run_is_too_short(settings, caplog, tmp_path):
    train.run(settings(*SMALL, "trainer.max_steps=6", "trainer.warmup_steps=2", "trainer.profile=true"), tmp_path)
    assert "no trace: trainer.profile needs 10 steps" in caplog.text and not (tmp_path / "profile").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["step_time_ms"]["n"] == 4


def test_clock__set_back_gives_no_negative_times(settings, tmp_path, monkeypatch):
    now = iter(range(10**9, 0, -10))  # each look at it is ten seconds earlier
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    state = json.loads(next((tmp_path / "checkpoints").glob("*/state.json")).read_text())
    assert 0 < summary["seconds"] < 300 and 0 < state["seconds"] < 300


GROUPS = [f"{g}={p.stem}" for g in ("optim", "schedule", "ops", "attn") for p in (ROOT / "conf" / g).glob("*.yaml")]


@pytest.mark.parametrize("option", [*GROUPS, "data=fake", "data=digits", "runtime=auto", "optim.opt=lamb"])
def test_option__trains(option, settings, tmp_path):
    if option.startswith("attn=") and (reason := attention.get(option[5:]).unavailable()):
        pytest.skip(reason)
    train.run(settings(*SMALL, option, "data.batch_size=4", "trainer.max_steps=1", "trainer.eval_every=null"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        (["runtime=cpu", "optim.opt=adamww"], "unknown_name"),
        (["model.name=vit_base_patch16_223"], "unknown_name"),
        (["runtime=cpu", "trainer.accum_steps=1000"], "plan.accum_steps"),
        (["checkpoint=nowhere.pt"], "models.weights_missing"),
        (["model.name=resnet50"], "models.attention"),
    ],
)
def test_impossible_settings__are_refused(settings, tmp_path, overrides, code):
    with error(code):
        train.run(settings(*overrides), tmp_path)


def test_wrong_name__is_reported_in_one_line_message(tmp_path):
    output = finish(start("attn=nosuch", f"hydra.run.dir={tmp_path}"), code=2)
    assert output.startswith("error: unknown attn 'nosuch'; known: auto, ") and "attn=NAME" in output
    assert len(output.splitlines()) == 1


@pytest.mark.slow
def test_xla__trains_on_a_cpu_with_the_losses_of_the_cpu(losses, tmp_path):
    """Train under torch_xla with PJRT_DEVICE=CPU; no step compiles twice."""
    from vitkernels.runtime import xla

    if xla.unavailable():
        pytest.skip(xla.unavailable())
    run = [*SMALL, "runtime=xla", "runtime.precision=fp32", "attn=native", "trainer.max_steps=5", "trainer.log_every=2"]
    run += ["ema.decay=0.9"]
    output = finish(start(*run, f"hydra.run.dir={tmp_path}", PJRT_DEVICE="CPU", XLA_FLAGS=QUICK_XLA))
    assert "XLA compiled the" not in output  # train, eval or EMA eval step again
    # XLA fuses and reorders sums: the golden losses to a few 1e-6, with room for other CPUs.
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] == "XLA:CPU" and summary["step_time_ms"]["n"] == 3
    assert summary["val_top1"] is not None and summary["val_ema_top1"] is not None


@pytest.mark.gpu
@pytest.mark.parametrize("attn", [name for name in attention.names() if name != "auto"])
def test_cuda__trains_with_attention_backend(attn, settings, losses, tmp_path):
    problem = attention.Problem(16, 2, 16, 16, 32, torch.bfloat16, "cuda")
    reason = attention.get(attn).unsupported(problem)
    if reason is not None:
        pytest.skip(reason)
    cfg = settings(*SMALL, "runtime=cuda", f"attn={attn}", "trainer.max_steps=5", "trainer.eval_every=null")
    train.run(cfg, tmp_path)
    # bf16 products: three digits.
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=2e-2)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_cuda_loop__synchronizes_at_boundaries_only(settings, monkeypatch, tmp_path):
    """Make every synchronizing operation between two boundaries an error."""
    from vitkernels.training.step_timer import StepTimer

    start, stop = StepTimer.start, StepTimer.stop
    seen = []

    def strict_start(timer):
        start(timer)
        if timer.warmup_left == 0:
            torch.cuda.set_sync_debug_mode("error")
            seen.append("window")

    def lenient_stop(timer):
        torch.cuda.set_sync_debug_mode("default")
        return stop(timer)

    monkeypatch.setattr(StepTimer, "start", strict_start)
    monkeypatch.setattr(StepTimer, "stop", lenient_stop)
    cfg = settings(*RICH, "runtime=cuda", "attn=sdpa", "trainer.max_steps=20", "trainer.eval_every=null")
    try:
        train.run(cfg, tmp_path)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) > 2
