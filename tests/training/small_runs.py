"""Start train.py on small models, in this process or its own, and watch its run folder."""

import os
import subprocess
import sys
import time
from pathlib import Path

from forked import Program

ROOT = Path(__file__).resolve().parents[2]


# A model of a few milliseconds per step; RICH adds drop path, EMA, soft targets and accumulation.
SMALL = ["runtime=cpu", "data.batch_size=16", "+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2"]
SMALL += ["+model.kwargs.depth=2", "trainer.log_every=4", "trainer.warmup_steps=2"]


RICH = [*SMALL, "model.drop_path_rate=0.2", "ema.decay=0.9", "data.mixup={mixup_alpha: 0.8, cutmix_alpha: 1.0}"]
RICH += ["trainer.accum_steps=2", "data.batch_size=32", "trainer.label_smoothing=0.1"]


def start(*overrides, **environment):
    """Start train.py with its imports done."""
    return Program([ROOT / "train.py", *overrides], ROOT, {**os.environ, **environment}, merged=True)


def start_python(*overrides):
    """Start train.py as a user does."""
    command = [sys.executable, str(ROOT / "train.py"), *overrides]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


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
