"""The worker processes end when they should, whatever becomes of the training process."""

import gc
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

from vitkernels.data import digits

KILLED = """
import os, signal
import numpy as np
from vitkernels.data.digits import Digits
from vitkernels.data.loader import DatasetLoader

samples = Digits(np.arange(8), np.zeros((8, 64)), np.zeros(8), image_size=8, in_chans=1, seed=0, affine=None)
loader = DatasetLoader(samples, batch_size=2, seed=0, training=True, num_workers=2)
next(loader.epoch(0))
print("training", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_workers_end_with_their_loader(monkeypatch):
    """Also when it dies in a garbage cycle, as one does that is caught in the traceback of an error."""
    loader = digits.build(image_size=8, in_chans=1, seed=0, batch_size=64, num_workers=2).train
    batches = loader.epoch(0)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    loader.cycle = [loader, batches]
    del loader, batches
    patience = 60  # seconds that torch's DataLoader waits for one worker; its own 5 a busy machine may take to end them
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", patience)
    start = time.perf_counter()
    gc.collect()
    assert time.perf_counter() - start < patience
    assert not any(worker.is_alive() for worker in workers)


def test_workers_end_with_a_killed_training_process():
    """They hold its standard output open, so reading that comes to an end only when all of them are gone."""
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL and run.stdout == "training\n", run.stderr
