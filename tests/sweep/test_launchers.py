"""Sweeps launched by submitit or driven by Optuna; this process is the sweep's own."""

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml

import train
from vitkernels.cli import command_line, wording
from vitkernels.sweep import job, slots
from vitkernels.training.log_file import LogFile
from vitkernels.training.terminal_log import TerminalLog

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["runtime=cpu", "data.batch_size=16", "+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2"]
SMALL += ["+model.kwargs.depth=1", "trainer.log_every=1", "trainer.warmup_steps=1", "checkpoints.every_epochs=null"]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Return start(*words), which runs `python train.py -m <words>` in this process and returns its exit code."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(slots.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.delenv(slots._SWEEP_GPUS, raising=False)

    def start(*words: str) -> int:
        argv = ["train.py", "-m", *words, f"hydra.sweep.dir={tmp_path}/sweep"]
        monkeypatch.setattr(sys, "argv", argv)
        try:
            return command_line.run(train.main, str(ROOT / "conf"))
        except SystemExit as end:
            return end.code

    root = logging.getLogger()
    level = root.level
    yield start
    os.environ.pop(slots._SWEEP_GPUS, None)
    root.setLevel(level)
    for handler in root.handlers[:]:
        if isinstance(handler, TerminalLog | LogFile):
            root.removeHandler(handler)
            handler.close()


def training_process(folder: Path) -> int | None:
    """Return the pid of the train.py that trains in `folder`, or None."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(word.endswith("train.py") for word in words) and f'hydra.run.dir="{folder}"' in words:
            return int(path.parent.name)
    return None


def preempt_once(folder: Path) -> None:
    """Send SIGUSR2 to the submitit task, as Slurm does, once its training has logged a few steps."""
    metrics = folder / "metrics.jsonl"
    end = time.monotonic() + 300
    while not metrics.exists() or metrics.read_text().count('"loss"') < 3:
        if time.monotonic() > end:
            return
        time.sleep(0.01)
    training = training_process(folder)
    parent = int(Path(f"/proc/{training}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(parent, signal.SIGUSR2)


@pytest.mark.slow
def test_submitit__preempted_job_resumes(start, tmp_path, losses):
    pytest.importorskip("submitit")
    folder = tmp_path / "sweep"
    preemption = threading.Thread(target=preempt_once, args=(folder / "trainer.max_steps=100",), daemon=True)
    preemption.start()
    code = start("hydra/launcher=local", *SMALL, "attn=native", "trainer.eval_every=null", "trainer.max_steps=100,3")
    assert code in (0, None), [path.read_text() for path in folder.glob(".submitit/*/*.out")]
    rows = json.loads((folder / "comparison.json").read_text())
    assert [(row["variant"], row["status"]) for row in rows] == [
        ("trainer.max_steps=100", "done"),
        ("trainer.max_steps=3", "done"),
    ]
    assert "| trainer.max_steps=3 |" in (folder / "comparison.md").read_text()
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    logs = [path.read_text() for path in folder.glob(".submitit/*/*.out")]
    assert sum("Requeued job" in log for log in logs) == 1
    preempted = folder / "trainer.max_steps=100"
    assert "resumed from" in (preempted / "output.log").read_text()
    assert list(losses(preempted)) == list(range(1, 101))  # every step once


@pytest.mark.filterwarnings("ignore:The ``declarative_base:DeprecationWarning")  # Optuna 2.10's SQLAlchemy
@pytest.mark.filterwarnings("ignore:Attempting to set identical low and high ylims:UserWarning")
def test_optuna__samples_and_replays_trials(start, tmp_path, monkeypatch, capsys):
    """Run the example study of conf/, shortened; trials train in this process, which saves starting five others."""
    pytest.importorskip("optuna")
    pytest.importorskip("triton")
    trained = []

    def in_this_process(folder, config, overrides, environment):
        trained.append(config.attn.tiles)
        train.run(config, folder)
        return 0, "", None

    monkeypatch.setattr(job, "_run_in_own_process", in_this_process)
    study = ["hydra/sweeper=optuna_lr_and_tiles", "hydra.sweeper.n_trials=2", *SMALL, "attn=triton_flash"]
    study += ["data=fake", "data.num_classes=4", "data.items=8", "data.batch_size=1", "trainer.max_steps=2"]
    study += ["trainer.eval_every=null"]
    study += ["sweep.objective=[train_loss, steps]"]
    assert start(*study) in (0, None), capsys.readouterr().out
    assert len(trained) == 2 and all(tiles.forward and tiles.dq and tiles.dkdv for tiles in trained)
    rows = json.loads((tmp_path / "sweep/comparison.json").read_text())
    assert [row["status"] for row in rows] == ["done", "done"] and rows[0]["variant"] != rows[1]["variant"]
    assert all(row["variant"].startswith("attn.tiles.dkdv=") and "optim.lr=" in row["variant"] for row in rows)
    first = yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text())
    assert start(*study) in (0, None)
    assert len(trained) == 2  # the same trials, read from the finished jobs
    assert yaml.safe_load((tmp_path / "sweep/optimization_results.yaml").read_text()) == first


def test_write_pending_verdict__launcher_failure_leaves_a_table(start, tmp_path, monkeypatch):
    """submitit fails like this if a job is killed together with the process that monitors it."""

    def killed(*_):
        raise RuntimeError("job 7 has not produced any output\nand more")

    monkeypatch.setattr(job, "_run_in_own_process", killed)
    assert start(*SMALL, "seed=0,1") == 1
    rows = json.loads((tmp_path / "sweep/comparison.json").read_text())
    assert all(row["status"] == "failed" and "did not finish" in row["reason"] for row in rows) and len(rows) == 2


def test_explain__missing_launcher_names_extra_message():
    from hydra.errors import MissingConfigException

    error = MissingConfigException("", "hydra/launcher/submitit_slurm", ["basic"])
    assert "pip install 'vitkernels[cluster]'" in str(wording.explained(error, str(ROOT / "conf")))
