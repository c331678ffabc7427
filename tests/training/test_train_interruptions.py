"""Killed and stopped runs of train.py resume exactly."""

import json
import signal
import time

import pytest
from small_runs import RICH, SMALL, finish, logged_steps, start, start_python, wait_until

import train
from vitkernels.training.signals import EXIT_INTERRUPTED

LENGTH = ["trainer.max_epochs=2", "trainer.eval_every=1", "checkpoints.every_steps=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Return the log and summary of an uninterrupted run in a process of its own."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    finish(start(*RICH, *LENGTH, f"hydra.run.dir={folder}"))
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return lines, json.loads((folder / "summary.json").read_text())


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, moments",
    [
        pytest.param(signal.SIGTERM, (0.3, 1.5, "config.json", "metrics.jsonl", "summary.json"), id="SIGTERM"),
        pytest.param(signal.SIGINT, (0.3, "metrics.jsonl"), id="SIGINT"),
    ],
)
def test_signal__at_any_moment_ends_with_75_or_0(number, moments, tmp_path):
    """During the imports, while data and model are built, while training, and after the end."""
    words = [*SMALL, "trainer.max_steps=12", "trainer.eval_every=null", "resume=auto"]
    for moment in moments:
        folder = tmp_path / str(moment)
        if isinstance(moment, float):
            process = start_python(*words, f"hydra.run.dir={folder}")
            time.sleep(moment)
        else:
            process = start(*words, f"hydra.run.dir={folder}")
            wait_until((folder / moment).exists, process)
        process.send_signal(number)
        output, _ = process.communicate(timeout=120)
        allowed = (0,) if moment == "summary.json" else (EXIT_INTERRUPTED, 0)
        assert process.returncode in allowed and "Traceback" not in output, (moment, process.returncode, output)
