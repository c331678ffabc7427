"""Sweeps of train.py: failed jobs, repeated commands, and SIGTERM."""

import json
import signal

import pytest
from small_runs import SMALL, finish, logged_steps, start, wait_until

from vitkernels.training.signals import EXIT_INTERRUPTED


@pytest.mark.slow
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


@pytest.mark.slow
def test_sweep__stops_on_sigterm(tmp_path):
    process = start("-m", *SMALL, "trainer.max_steps=1000,1001", f"hydra.sweep.dir={tmp_path}")
    folder = tmp_path / "trainer.max_steps=1000"
    assert wait_until(lambda: logged_steps(folder) >= 4, process)
    process.send_signal(signal.SIGTERM)
    output = finish(process, EXIT_INTERRUPTED)
    assert "to continue the sweep" in output
    assert list((folder / "checkpoints").glob("step_*"))
    assert not (tmp_path / "trainer.max_steps=1001").exists()
