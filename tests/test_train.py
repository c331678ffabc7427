"""train.py end to end: golden losses per backend, interruptions, resuming, evaluation, sweeps, errors."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train
from vitkernels import attention
from vitkernels.errors import UsageError
from vitkernels.training.history import NonFiniteLossError
from vitkernels.training.signals import EXIT_INTERRUPTED

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((ROOT / "tests/golden/losses.json").read_text())

# A model that takes a few milliseconds a step, and has all that could go wrong: drop path, EMA, soft targets, workers.
SMALL = ["runtime=cpu", "data.batch_size=16", "+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2"]
SMALL += ["+model.kwargs.depth=2", "trainer.log_every=4", "trainer.warmup_steps=2"]
RICH = [*SMALL, "model.drop_path_rate=0.2", "ema.decay=0.9", "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"]
RICH += ["trainer.accum_steps=2", "data.batch_size=32", "trainer.label_smoothing=0.1"]


def command(*overrides):
    return [sys.executable, str(ROOT / "train.py"), *overrides]


def start(*overrides, **environment):
    return subprocess.Popen(
        command(*overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


@pytest.mark.parametrize("attn", [name for name in attention.names() if name != "auto"])
def test_golden_losses(attn, settings, losses, tmp_path):
    """Five steps with each backend give the stored losses of the reference.

    Each backend sums in its own order: about 1e-7 per product, which five AdamW steps amplify to about 1e-5.
    """
    cfg = settings(*SMALL, f"attn={attn}", "trainer.max_steps=5", "trainer.eval_every=null")
    reason = attention.get(attn).unavailable()
    if reason is not None:
        pytest.skip(reason)
    train.run(cfg, tmp_path)
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)


def test_a_run_leaves_what_it_promises(settings, losses, tmp_path):
    train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    expected = {
        "attn": "native",
        "ops": "eager",
        "runtime": "cpu",
        "steps": 12,
        "seed": 0,
        "mfu": None,
        "status": "done",
    }
    assert {key: summary[key] for key in expected} == expected
    assert summary["step_time_ms"]["n"] == 10 and summary["step_time_ms"]["median"] > 0
    assert summary["images_per_s"] == pytest.approx(16e3 / summary["step_time_ms"]["mean"], rel=1e-3)
    for key in (
        "device",
        "versions",
        "input_wait_ms",
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
    for tag in ("train/loss", "train/lr", "train/grad_norm", "time/step_ms", "time/images_per_s", "time/input_wait_ms"):
        assert tag in scalars, tag
    assert {"val/top1", "val/top5"} <= set(scalars)

    # What was written can be evaluated, and by plain timm.
    for weights in ("model.safetensors", "checkpoints/best.pt"):
        cfg = settings(*SMALL, "attn=sdpa", "mode=eval", f"checkpoint={tmp_path / weights}")
        train.run(cfg, tmp_path / "eval")
        result = json.loads((tmp_path / "eval" / "eval.json").read_text())
        assert result["top1"] == pytest.approx(summary["val_top1"]) and result["images"] == 360

    # A second run does not overwrite it; the same run resumed has nothing to do.
    with pytest.raises(UsageError, match="already holds a run"):
        train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12"), tmp_path)
    train.run(settings(*SMALL, "attn=native", "trainer.max_steps=12", "resume=auto"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def read_board(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder))
    board.Reload()
    return board.Tags()["scalars"]


LENGTH = ["trainer.max_epochs=2", "trainer.eval_every=1", "checkpoints.every_steps=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """The losses of a run that nobody disturbed, in a process of its own."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(start(*RICH, *LENGTH, f"hydra.run.dir={folder}"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "summary.json").read_text())


def wait_until(condition, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            return False
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.0005)
    return True


def logged_steps(folder):
    path = folder / "metrics.jsonl"
    return path.read_text().count('"loss"') if path.exists() else 0


def test_killed_in_mid_epoch_and_in_a_checkpoint_write_then_resumed(uninterrupted, tmp_path):
    """SIGKILL twice, resume=auto: bit for bit the losses and evaluations of the run that was never killed."""
    overrides = [*RICH, *LENGTH, "resume=auto", f"hydra.run.dir={tmp_path}"]
    process = start(*overrides)
    assert wait_until(lambda: logged_steps(tmp_path) >= 8, process)
    process.kill()
    process.communicate()
    process = start(*overrides)
    assert wait_until(lambda: logged_steps(tmp_path) >= 25, process)
    assert wait_until(lambda: list((tmp_path / "checkpoints").glob("*.tmp")), process)
    process.kill()
    process.communicate()
    output = finish(start(*overrides))
    assert "resumed from" in output
    lines, summary = uninterrupted
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == lines
    resumed = json.loads((tmp_path / "summary.json").read_text())
    for key in ("val_top1", "val_ema_top1", "best", "steps"):
        assert resumed[key] == summary[key], key


def test_sigterm_writes_a_checkpoint_and_says_so(uninterrupted, settings, losses, tmp_path):
    """... and resume=auto from another folder beside it finds the unfinished run, past a truncated checkpoint."""
    folder = tmp_path / "first"
    process = start(*RICH, *LENGTH, f"hydra.run.dir={folder}")
    assert wait_until(lambda: logged_steps(folder) >= 13, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, EXIT_INTERRUPTED)
    assert "stopped by SIGTERM" in output and "resume=auto" in output
    stopped_at = max(losses(folder))
    checkpoints = sorted((folder / "checkpoints").glob("step_*.pt"))
    assert checkpoints[-1].name == f"step_{stopped_at:08d}.pt"
    checkpoints[-1].write_bytes(checkpoints[-1].read_bytes()[:-100])

    train.run(settings(*RICH, *LENGTH, "resume=auto"), tmp_path / "second")
    resumed = losses(tmp_path / "second")
    expected = {line["step"]: line["loss"] for line in uninterrupted[0] if "loss" in line}
    assert min(resumed) == int(checkpoints[-2].stem.split("_")[1]) + 1
    # Another process has other threads' states, but the arithmetic is the same.
    assert resumed == {step: loss for step, loss in expected.items() if step in resumed}
    assert max(resumed) == max(expected)


def test_a_checkpoint_of_another_run_is_refused(settings, tmp_path):
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path / "a")
    for override, message in (("+model.kwargs.mlp_ratio=2", "another model"), ("seed=1", "seed is 0 there and 1 here")):
        with pytest.raises(UsageError, match=message):
            train.run(settings(*SMALL, override, f"resume={tmp_path / 'a'}"), tmp_path / override)
    with pytest.raises(UsageError, match="no such file"):
        train.run(settings(*SMALL, f"resume={tmp_path / 'nothing.pt'}"), tmp_path / "c")


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(settings, tmp_path):
    cfg = settings(*SMALL, "optim=sgd", "optim.lr=1e30", "schedule=constant", "trainer.clip_grad=null")
    with pytest.raises(NonFiniteLossError, match=r"loss is (nan|inf) at step \d+: lr .* samples digits\["):
        train.run(cfg, tmp_path)
    assert not list((tmp_path / "checkpoints").glob("*.pt"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=vit_base_patch16_223"], "unknown model"),
        (["runtime=cpu", "trainer.accum_steps=1000"], "accum_steps=1000"),
        (["checkpoint=nowhere.pt"], "no such file"),
        (["model.name=resnet50"], "cannot take an attention backend"),
    ],
)
def test_what_cannot_be_done_is_said(settings, tmp_path, overrides, message):
    with pytest.raises(UsageError, match=message):
        train.run(settings(*overrides), tmp_path)


def test_the_command_line_answers_a_wrong_name_in_one_line(tmp_path):
    output = finish(start("attn=nosuch", f"hydra.run.dir={tmp_path}"), code=2)
    assert output.startswith("error: unknown attn 'nosuch'; known: auto, ") and "attn=NAME" in output
    assert len(output.splitlines()) == 1


def test_xla_trains_on_any_machine(losses, tmp_path):
    """torch_xla with PJRT_DEVICE=CPU gives the losses of the CPU, one compiled graph for all steps after the first."""
    from vitkernels.runtime import xla

    if xla.unavailable():
        pytest.skip(xla.unavailable())
    run = [*SMALL, "runtime=xla", "runtime.precision=fp32", "attn=native", "trainer.max_steps=5", "trainer.log_every=2"]
    output = finish(start(*run, f"hydra.run.dir={tmp_path}", PJRT_DEVICE="CPU"))
    assert "compiled the train step again" not in output
    # XLA fuses and reorders sums: the golden losses to a few 1e-6, with room for other CPUs.
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] == "XLA:CPU" and summary["step_time_ms"]["n"] == 3 and summary["val_top1"] is not None


def test_a_sweep_survives_its_failures_and_ends_with_a_verdict(tmp_path):
    """One variant diverges; the table has it as failed, and the same command again runs only that one."""
    sweep = ["-m", *SMALL, "attn=native", "optim=sgd", "schedule=constant", "trainer.clip_grad=null", "data=fake"]
    sweep += ["data.num_classes=10", "trainer.max_steps=12", "trainer.eval_every=null", "optim.lr=0.01,1e30"]
    sweep += [f"hydra.sweep.dir={tmp_path}"]
    output = finish(start(*sweep), code=1)
    good, bad = json.loads((tmp_path / "comparison.json").read_text())
    assert (good["variant"], good["status"], good["ratio"]) == ("optim.lr=0.01", "done", 1.0)
    assert bad["status"] == "failed" and "loss is" in bad["reason"]
    assert output.index("optim.lr=1e+30 failed: loss is") < output.index("Verdict")
    table = (tmp_path / "comparison.md").read_text()
    assert "| optim.lr=0.01 |" in table and "failed: loss is" in table
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    summary = (tmp_path / "optim.lr=0.01" / "summary.json").read_bytes()
    output = finish(start(*sweep), code=1)
    assert output.count("done before, skipped") == 1 and "optim.lr=1e+30 failed: loss is" in output
    assert (tmp_path / "optim.lr=0.01" / "summary.json").read_bytes() == summary


@pytest.mark.gpu
@pytest.mark.parametrize("attn", [name for name in attention.names() if name != "auto"])
def test_cuda_trains_with_each_backend(attn, settings, losses, tmp_path):
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
def test_the_cuda_loop_waits_for_the_device_at_log_boundaries_only(settings, monkeypatch, tmp_path):
    """Between two boundaries any operation that would make the host wait is an error."""
    from vitkernels.training.timer import StepTimer

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
