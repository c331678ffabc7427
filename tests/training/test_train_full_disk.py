"""Runs on a disk that is full, or fills up during training."""

import errno
import json
import math
import subprocess
import sys

import pytest
from expecting import error
from small_runs import ROOT, SMALL

import train
from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint.export import read_notes
from vitkernels.models import read_state_dict
from vitkernels.training import disk_space, result, trainer


def test_full_disk__is_refused_before_training(settings, monkeypatch, tmp_path, caplog):
    monkeypatch.setattr(disk_space, "free_bytes", lambda _: 1_000_000)
    with error("run.disk_full", free=1_000_000) as caught:
        train.run(settings(*SMALL, "trainer.max_steps=2"), tmp_path)
    weights = 4 * sum(math.prod(shape) for shape in _shapes(settings, tmp_path))
    # The last and the best weights, and a checkpoint of weights and Adam's averages.
    assert caught.value.fields["needed"] == 5 * weights
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
