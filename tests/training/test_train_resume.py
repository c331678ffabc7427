"""resume=auto and resume=PATH: which runs continue, which are complete, and which are refused."""

import json
import shutil
import subprocess
import sys

import pytest
from expecting import error
from small_runs import ROOT, SMALL

import train
from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint.checkpoints import CheckpointError
from vitkernels.checkpoint.export import read_notes
from vitkernels.training import trainer
from vitkernels.training.run_dir import FolderInUseError


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
