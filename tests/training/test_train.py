"""train.py end to end: losses per backend, interruptions, resuming, evaluation, sweeps, errors."""

import errno
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from expecting import error

import train
from vitkernels import attention
from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint.checkpoints import CheckpointError
from vitkernels.checkpoint.export import read_notes
from vitkernels.models import read_state_dict
from vitkernels.training import disk_space, result, trainer
from vitkernels.training.health import NonFiniteLossError
from vitkernels.training.out_of_memory import OutOfMemoryError
from vitkernels.training.run_dir import FolderInUseError
from vitkernels.training.signals import EXIT_INTERRUPTED
from vitkernels.training.step_timer import PARTS

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = json.loads((ROOT / "tests/golden/losses.json").read_text())

# A model of a few milliseconds per step; RICH adds drop path, EMA, soft targets and accumulation.
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


LENGTH = ["trainer.max_epochs=2", "trainer.eval_every=1", "checkpoints.every_steps=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the log and summary of an uninterrupted run in a process of its own."""
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


def test_kill__in_mid_epoch_and_in_a_checkpoint_write_changes_nothing(uninterrupted, tmp_path):
    """After two SIGKILLs, resume=auto gives the losses and evaluations of the uninterrupted run bit for bit."""
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


def test_sigterm__writes_a_checkpoint_that_another_folder_resumes(uninterrupted, settings, losses, tmp_path):
    """resume=auto in another folder finds the unfinished run next to it and skips a truncated checkpoint."""
    folder = tmp_path / "2026-01-01_00-00-00"
    process = start(*RICH, *LENGTH, f"hydra.run.dir={folder}")
    assert wait_until(lambda: logged_steps(folder) >= 13, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, EXIT_INTERRUPTED)
    assert "stopped by SIGTERM" in output and "resume=auto" in output
    stopped_at = max(losses(folder))
    checkpoints = sorted((folder / "checkpoints").glob("step_*"))
    assert checkpoints[-1].name == f"step_{stopped_at:08d}"
    weights = checkpoints[-1] / "rank_00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])

    train.run(settings(*RICH, *LENGTH, "resume=auto"), tmp_path / "2026-01-01_00-00-59")
    resumed = losses(tmp_path / "2026-01-01_00-00-59")
    expected = {line["step"]: line["loss"] for line in uninterrupted[0] if "loss" in line}
    assert min(resumed) == int(checkpoints[-2].name.split("_")[1]) + 1
    # The arithmetic does not depend on the process.
    assert resumed == {step: loss for step, loss in expected.items() if step in resumed}
    assert max(resumed) == max(expected)


def test_resume__refuses_the_checkpoint_of_another_run(settings, tmp_path):
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path / "a")
    for other in ("+model.kwargs.mlp_ratio=2", "model.kwargs.num_heads=4"):  # the latter has the same weights
        words = [word for word in SMALL if other.split("=")[0] not in word]
        with error("run.checkpoint_mismatch", entries=["model_arguments"]):
            train.run(settings(*words, "+" + other.lstrip("+"), f"resume={tmp_path / 'a'}"), tmp_path / "b")
    with error("run.checkpoint_mismatch", entries=["seed"]):
        train.run(settings(*SMALL, "seed=1", f"resume={tmp_path / 'a'}"), tmp_path / "c")
    with error("checkpoint.missing", kind=CheckpointError):
        train.run(settings(*SMALL, f"resume={tmp_path / 'nothing'}"), tmp_path / "d")


def test_nonfinite_loss__stops_the_run_before_a_checkpoint(settings, tmp_path):
    cfg = settings(*SMALL, "optim=sgd", "optim.lr=1e30", "schedule=constant", "trainer.clip_grad=null")
    with pytest.raises(NonFiniteLossError) as error_:
        train.run(cfg, tmp_path)
    assert error_.value.step >= 1 and "samples digits[" in str(error_.value)
    assert not list((tmp_path / "checkpoints").glob("step_*"))


def test_lost_summary__is_rewritten_without_training(settings, losses, tmp_path):
    """The summary is missing if a run is killed after its last checkpoint. Also resumes with optimizer kwargs."""
    betas = ["+optim.kwargs.betas=[0.9,0.95]"]
    cfg = settings(*SMALL, "trainer.max_steps=4", *betas, "resume=auto")
    first, later = tmp_path / "2026-01-01_00-00-00", tmp_path / "2026-01-02_00-00-00"
    train.run(cfg, first)
    summary = json.loads((first / "summary.json").read_text())
    metrics = (first / "metrics.jsonl").read_text()
    (first / "summary.json").unlink()
    train.run(cfg, first)
    again = json.loads((first / "summary.json").read_text())
    for key in ("train_loss", "val_top1", "val_top5", "best", "steps", "status"):
        assert again[key] == summary[key] is not None, key
    assert (first / "metrics.jsonl").read_text() == metrics
    # The same command later finds the run complete; other settings in its folder are refused by name.
    train.run(cfg, later)
    assert not (later / "metrics.jsonl").exists()
    with error("run.settings_differ", differences=["optim.lr was 0.001 and is now 0.5"]):
        train.run(settings(*SMALL, "trainer.max_steps=4", *betas, "resume=auto", "optim.lr=0.5"), first)
    assert json.loads((first / "summary.json").read_text()) == again
    # Going back in the same folder would overwrite it; an extended run continues.
    longer = ["trainer.max_steps=6", *betas, "checkpoints.keep=5"]
    train.run(settings(*SMALL, *longer, "resume=auto"), first)
    assert list(losses(first)) == [1, 2, 3, 4, 5, 6]
    older = first / "checkpoints" / "step_00000004"
    shutil.copytree(older, tmp_path / "other" / "checkpoints" / older.name)
    for asked in (older, tmp_path / "other"):
        with error("run.newer_checkpoints"):
            train.run(settings(*SMALL, *longer, f"resume={asked}"), first)


def test_profile__skipped_if_the_run_is_too_short(settings, caplog, tmp_path):
    train.run(settings(*SMALL, "trainer.max_steps=6", "trainer.warmup_steps=2", "trainer.profile=true"), tmp_path)
    assert "no trace: trainer.profile needs 10 steps" in caplog.text and not (tmp_path / "profile").exists()
    assert json.loads((tmp_path / "summary.json").read_text())["step_time_ms"]["n"] == 4


def test_extended_run__is_complete_only_at_its_new_length(settings, losses, monkeypatch, tmp_path):
    at = lambda steps, *more: settings(*SMALL, f"trainer.max_steps={steps}", "resume=auto", *more)  # noqa: E731
    summary = lambda: json.loads((tmp_path / "summary.json").read_text())  # noqa: E731
    train.run(at(4), tmp_path)
    short = summary()
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "check_finite", lambda *_, **__: pytest.fail("an error on the way"))
        with pytest.raises(BaseException, match="an error on the way"):
            train.run(at(8), tmp_path)
    # At its first length the run is still complete, without training; the extended one continues.
    train.run(at(4), tmp_path)
    assert summary() == short
    train.run(at(8), tmp_path)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6, 7, 8] and summary()["steps"] == 8

    # A refused run changes nothing.
    long = summary()
    for refused, code, fields in (
        (at(6), "run.past_end", {"step": 8, "total_steps": 6}),
        (at(16, "trainer.accum_steps=1000"), "plan.accum_steps", {"accum_steps": 1000}),
        (at(8, "compile=true"), "run.settings_differ", {"differences": ["compile was 'auto' and is now True"]}),
    ):
        with error(code, **fields):
            train.run(refused, tmp_path)
        assert summary() == long
    train.run(at(8), tmp_path)
    train.run(at(8, "trainer.log_every=3"), tmp_path)
    assert summary() == long


def test_complete_run_without_checkpoints__is_not_restarted(settings, tmp_path):
    at = lambda steps: settings(*SMALL, f"trainer.max_steps={steps}", "resume=auto", "checkpoints.every_epochs=null")  # noqa: E731
    train.run(at(2), tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with error("run.no_checkpoint"):
        train.run(at(4), tmp_path)
    train.run(at(2), tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_best__is_a_checkpoint_that_could_be_written(settings, monkeypatch, tmp_path):
    """The disk is full when the checkpoint of the best evaluation is written."""
    results = iter([50.0, 60.0, 55.0])
    card = {"top5": 90.0, "loss": 1.0, "images": 8, "images_per_s": None}
    monkeypatch.setattr(trainer, "evaluate", lambda *_, **__: {"top1": next(results), **card})
    write = ckpt._Writer.write_data

    def full(writer, *args):
        if writer.state["step"] == 4:
            raise OSError(28, "No space left on device")
        return write(writer, *args)

    monkeypatch.setattr(ckpt._Writer, "write_data", full)
    train.run(settings(*SMALL, "data=fake", "data.items=32", "trainer.max_steps=6"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["best"] == {
        "top1": 55.0, "loss": 1.0, "step": 6, "epoch": 3.0, "weights": "best.safetensors"
    }  # fmt: skip
    assert read_notes(tmp_path / "best.safetensors", ["best"])["best"]["step"] == 6
    assert ckpt.load_state(tmp_path / "checkpoints" / "best")["step"] == 6


@pytest.mark.parametrize(("top1", "best"), [([50.0, 40.0, 40.0], 2), ([50.0, 60.0, 60.0], 4)])
def test_resume_in_another_folder__keeps_the_best_checkpoint(settings, monkeypatch, tmp_path, top1, best):
    """The run is killed before its last evaluation; the best is the earlier checkpoint or the last one."""
    results = iter(top1)
    card = {"top5": 90.0, "loss": 1.0, "images": 8, "images_per_s": None}
    monkeypatch.setattr(trainer, "evaluate", lambda *_, **__: {"top1": next(results), **card})
    cfg = settings(*SMALL, "data=fake", "data.items=32", "trainer.max_steps=4", "resume=auto")
    first, later = tmp_path / "2026-01-01_00-00-00", tmp_path / "2026-01-02_00-00-00"
    train.run(cfg, first)
    (first / "summary.json").unlink()
    train.run(cfg, later)
    kept = json.loads((later / "summary.json").read_text())["best"]
    assert kept == {"top1": max(top1), "loss": 1.0, "step": best, "epoch": best / 2, "weights": "best.safetensors"}
    assert read_notes(later / "best.safetensors", ["best"])["best"]["step"] == best
    if best == 2:
        assert (later / "best.safetensors").read_bytes() == (first / "best.safetensors").read_bytes()
    assert ckpt.load_state(later / "checkpoints" / "best")["step"] == best


HOLD = """
import pathlib, sys, time
from vitkernels.training.run_dir import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(300)
"""


def test_folder_in_use__is_not_touched(settings, tmp_path):
    holder = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    cfg = settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null", "resume=auto")
    try:
        assert holder.stdout.readline() == "held\n"
        with error("run.folder_in_use", kind=FolderInUseError) as caught:
            train.run(cfg, tmp_path)
        assert caught.value.fields["holder"].startswith(f"{holder.pid} on ")
        assert [path.name for path in tmp_path.iterdir()] == [".lock"]
    finally:
        holder.kill()
        holder.communicate()
    train.run(cfg, tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_failed_attempt__does_not_block_its_folder(settings, tmp_path):
    with error("unknown_name", name="nosuch"):
        train.run(settings(*SMALL, "model.name=nosuch"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "done"


def test_nonfinite_gradient__is_not_saved(settings, monkeypatch, tmp_path):
    """With a broken backward kernel, the loss stays finite for a step after the weights are not."""
    norm = torch.nn.utils.get_total_norm
    calls = []

    def broken(gradients):
        calls.append(1)
        if len(calls) == 4:
            gradients[0].fill_(float("nan"))
        return norm(gradients)

    monkeypatch.setattr(torch.nn.utils, "get_total_norm", broken)
    cfg = settings(*SMALL, "checkpoints.every_steps=1", "checkpoints.keep=9")
    with pytest.raises(NonFiniteLossError) as error_:
        train.run(cfg, tmp_path)
    assert error_.value.step == 4 and "step_00000003." in str(error_.value)
    assert max(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == "step_00000003"


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


def test_xla__trains_on_a_cpu_with_the_losses_of_the_cpu(losses, tmp_path):
    """Train under torch_xla with PJRT_DEVICE=CPU; no step compiles twice."""
    from vitkernels.runtime import xla

    if xla.unavailable():
        pytest.skip(xla.unavailable())
    run = [*SMALL, "runtime=xla", "runtime.precision=fp32", "attn=native", "trainer.max_steps=5", "trainer.log_every=2"]
    run += ["ema.decay=0.9"]
    output = finish(start(*run, f"hydra.run.dir={tmp_path}", PJRT_DEVICE="CPU"))
    assert "XLA compiled the" not in output  # train, eval or EMA eval step again
    # XLA fuses and reorders sums: the golden losses to a few 1e-6, with room for other CPUs.
    assert list(losses(tmp_path).values()) == pytest.approx(GOLDEN["small"], rel=1e-4)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["device"] == "XLA:CPU" and summary["step_time_ms"]["n"] == 3
    assert summary["val_top1"] is not None and summary["val_ema_top1"] is not None


def test_sweep__survives_failures_and_ends_with_a_verdict(tmp_path):
    """One variant diverges: the table lists it as failed, and repeating the command runs only that one."""
    sweep = ["-m", *SMALL, "attn=native", "optim=sgd", "schedule=constant", "trainer.clip_grad=null", "data=fake"]
    sweep += ["data.num_classes=10", "trainer.max_steps=32", "trainer.eval_every=null", "optim.lr=0.01,1e30"]
    sweep += [f"hydra.sweep.dir={tmp_path}"]
    output = finish(start(*sweep), code=1)
    good, bad = json.loads((tmp_path / "comparison.json").read_text())
    assert (good["variant"], good["status"], good["ratio"]) == ("optim.lr=0.01", "done", 1.0)
    assert bad["status"] == "failed" and "loss is" in bad["reason"]
    assert output.index("optim.lr=1e+30 failed: loss is") < output.index("Verdict")
    table = (tmp_path / "comparison.md").read_text()
    assert "| optim.lr=0.01 |" in table and "failed: loss is" in table
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")
    # A long training by other code is kept, and stays recorded as that code's.
    done, by = tmp_path / "optim.lr=0.01", {}
    for name, change in (("summary.json", {"seconds": 3600.0}), ("job.json", {"circumstances": {"code": "earlier"}})):
        by[name] = json.loads((done / name).read_text()) | change
        (done / name).write_text(json.dumps(by[name]))
    output = finish(start(*sweep), code=1)
    assert output.count("skipped, already done") == 1 and "optim.lr=1e+30 failed: loss is" in output
    assert {name: json.loads((done / name).read_text()) for name in by} == by


def test_sweep__stops_on_sigterm(tmp_path):
    process = start("-m", *SMALL, "trainer.max_steps=1000,1001", f"hydra.sweep.dir={tmp_path}")
    folder = tmp_path / "trainer.max_steps=1000"
    assert wait_until(lambda: logged_steps(folder) >= 4, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, EXIT_INTERRUPTED)
    assert "to continue the sweep" in output
    assert list((folder / "checkpoints").glob("step_*"))
    assert not (tmp_path / "trainer.max_steps=1001").exists()


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


def test_damaged_log__does_not_end_a_resume(settings, losses, tmp_path, caplog):
    at = lambda steps: settings(*SMALL, f"trainer.max_steps={steps}", "resume=auto", "trainer.eval_every=null")  # noqa: E731
    train.run(at(4), tmp_path)
    lines = (tmp_path / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(lines[0] + b'{"step": \xff}\n[]\n' + b"".join(lines[1:]))
    train.run(at(6), tmp_path)
    assert list(losses(tmp_path)) == [1, 2, 3, 4, 5, 6] and "2 damaged lines" in caplog.text
    (tmp_path / "metrics.jsonl").unlink()
    train.run(at(8), tmp_path)
    assert list(losses(tmp_path)) == [7, 8] and "metrics.jsonl is missing" in caplog.text


@pytest.mark.parametrize("content", [None, '{"mode": "tra'])
def test_lost_config__is_named(content, settings, tmp_path):
    cfg = settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null", "resume=auto")
    train.run(cfg, tmp_path)
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with error("run.config_lost") as caught:
        train.run(settings(*SMALL, "trainer.max_steps=4", "trainer.eval_every=null", "resume=auto"), tmp_path)
    assert "it was started with: python " in str(caught.value)


def test_clock__set_back_gives_no_negative_times(settings, tmp_path, monkeypatch):
    now = iter(range(10**9, 0, -10))  # each look at it is ten seconds earlier
    monkeypatch.setattr(time, "time", lambda: float(next(now)))
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    state = json.loads(next((tmp_path / "checkpoints").glob("*/state.json")).read_text())
    assert 0 < summary["seconds"] < 300 and 0 < state["seconds"] < 300


@pytest.mark.parametrize(
    "failure",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 1 GiB"),
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
        ),
        MemoryError(),
    ],
    ids=["cuda", "cpu", "python"],
)
def test_out_of_memory__is_explained_and_resumes_with_a_smaller_batch(failure, settings, losses, monkeypatch, tmp_path):
    words = [word for word in SMALL if "batch_size" not in word] + ["trainer.eval_every=null", "trainer.max_steps=6"]
    train.run(settings(*words, "data.batch_size=16"), tmp_path / "undisturbed")
    take_step = trainer.Trainer.train_step

    def out_of_memory(self, batches):
        if self.state.step == 4:
            raise failure
        take_step(self, batches)

    save = ["checkpoints.every_steps=2", "resume=auto"]
    with monkeypatch.context() as patch:
        patch.setattr(trainer.Trainer, "train_step", out_of_memory)
        with pytest.raises(OutOfMemoryError) as caught:
            train.run(settings(*words, *save, "data.batch_size=16"), tmp_path / "run")
    message = str(caught.value)
    assert caught.value.fields["batch_size"] == 16 and caught.value.fields["peak_bytes"] > 2**20
    assert "\n" not in message and "data.batch_size=8 trainer.accum_steps=2" in message
    assert ("2.00 GiB more" in message) == (not isinstance(failure, MemoryError))
    # As the message says. The sums of two halves round differently: 1e-7 a step, which AdamW amplifies.
    train.run(settings(*words, *save, "data.batch_size=8", "trainer.accum_steps=2"), tmp_path / "run")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "undisturbed"), rel=1e-4)


def test_out_of_memory__of_an_absurdly_large_model(settings, tmp_path):
    words = [word for word in SMALL if "embed_dim" not in word]
    with pytest.raises(OutOfMemoryError):
        train.run(settings(*words, "+model.kwargs.embed_dim=30000000"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["reason"].startswith("out of memory on CPU")


def test_other_runtime_errors__are_not_reported_as_out_of_memory(settings, monkeypatch, tmp_path):
    def broken(*_):
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr(trainer.Trainer, "train_step", broken)
    with pytest.raises(RuntimeError, match="shapes"):
        train.run(settings(*SMALL), tmp_path)


def test_full_disk__is_refused_before_training(settings, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 1_000_000)
    with error("run.disk_full", free=1_000_000) as caught:
        train.run(settings(*SMALL, "trainer.max_steps=2"), tmp_path)
    weights = 4 * sum(math.prod(shape) for shape in _shapes(settings, tmp_path))
    assert caught.value.fields["needed"] == 4 * weights  # the weights, and a checkpoint of them and Adam's averages
    assert not (tmp_path / "metrics.jsonl").exists()
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 5 * weights)
    train.run(settings(*SMALL, "trainer.max_steps=2", "trainer.eval_every=null"), tmp_path / "warned")
    assert "two checkpoints take" in caplog.text


def _shapes(settings, tmp_path):
    monkey = tmp_path / "small"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(disk_space, "free_bytes", lambda _: 10**12)
        train.run(settings(*SMALL, "trainer.max_steps=1", "trainer.eval_every=null"), monkey)
    return [tensor.shape for tensor in read_state_dict(monkey / "model.safetensors").values()]


def test_full_disk__makes_room_for_the_weights(settings, monkeypatch, tmp_path):
    """The export fails once; without its second checkpoint the disk has room."""
    export, calls = result.export_safetensors, []

    def full(*args):
        calls.append(len(list((tmp_path / "checkpoints").glob("step_*"))))
        if calls[-1] > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        export(*args)

    monkeypatch.setattr(result, "export_safetensors", full)
    words = ["trainer.max_steps=4", "checkpoints.every_steps=2", "trainer.eval_every=null"]
    train.run(settings(*SMALL, *words), tmp_path)
    assert calls == [2, 1] and (tmp_path / "model.safetensors").exists()


def test_full_disk__is_an_error_if_the_best_weights_were_lost(settings, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ckpt._Writer, "write_data", full)
    with pytest.raises(disk_space.LostCheckpointsError):
        train.run(settings(*SMALL, "data=fake", "data.items=32", "trainer.max_steps=2"), tmp_path)
    assert (tmp_path / "model.safetensors").exists()


FULL = """
import resource, runpy, sys, threading, time
from pathlib import Path
def fill(log=Path({log!r})):
    while not (log.exists() and b'"step": 8,' in log.read_bytes()):
        time.sleep(0.001)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
threading.Thread(target=fill, daemon=True).start()
sys.argv = ["train.py", *{words!r}]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_disk_that_fills_up__gives_one_log_line_per_file_and_no_traceback(tmp_path):
    """A file size limit stands in for the full disk: log, metrics, TensorBoard, checkpoints and weights fail."""
    words = [*SMALL, "trainer.max_steps=40", "checkpoints.every_steps=10", f"hydra.run.dir={tmp_path}"]
    script = FULL.format(log=str(tmp_path / "metrics.jsonl"), words=words)
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    output = run.stdout + run.stderr
    assert run.returncode == 2, output
    assert "Traceback" not in output and "Logging error" not in output, output
    assert output.count("the log is no longer written") == 1
    # Once for TensorBoard's file, and once for metrics.jsonl, which is shorter and reaches the limit later.
    assert output.count("metrics wait in memory") in (1, 2), output
    assert output.splitlines()[-1].startswith("error: the weights cannot be written to")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal__at_any_moment_ends_with_75_or_0(number, tmp_path):
    """During the imports, while data and model are built, while training, and after the end."""
    words = [*SMALL, "trainer.max_steps=12", "trainer.eval_every=null", "resume=auto"]
    for moment in (0.3, 1.5, "config.json", "metrics.jsonl", "summary.json"):
        folder = tmp_path / str(moment)
        process = start(*words, f"hydra.run.dir={folder}")
        if isinstance(moment, float):
            time.sleep(moment)
        else:
            wait_until((folder / moment).exists, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        allowed = (0,) if moment == "summary.json" else (EXIT_INTERRUPTED, 0)
        assert process.returncode in allowed and "Traceback" not in output, (moment, process.returncode, output)
