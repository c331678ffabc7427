"""Worker processes end with their loader and with the training process."""

import gc
import multiprocessing
import signal
import subprocess
import sys
import time
from pathlib import Path

from expecting import error

from vitkernels.data import digits, workers

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

FORK_SERVER = """
import os
import time
from pathlib import Path
import numpy as np
from vitkernels.data.digits import Digits
from vitkernels.data.loader import DatasetLoader

def children():
    found = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
    return [Path(f"/proc/{child}/cmdline").read_bytes() for child in found]

samples = Digits(np.arange(8), np.zeros((8, 64)), np.zeros(8), image_size=8, in_chans=1, seed=0, affine=None)
DatasetLoader(samples, batch_size=2, seed=0, training=True)
assert not children(), "started by a loader without workers"
loader = DatasetLoader(samples, batch_size=2, seed=0, training=True, num_workers=2)
end = time.monotonic() + 60  # until its process has its command line
while not any(b"multiprocessing.forkserver" in command for command in children()):
    assert time.monotonic() < end, "not started by a loader with workers"
"""

SLOW_MAIN = """
import time
import numpy as np
import torch
from vitkernels.data.digits import Digits
from vitkernels.data.loader import DatasetLoader

if __name__ != "__main__":
    time.sleep(4)  # in each worker

samples = Digits(np.arange(8), np.zeros((8, 64)), np.zeros(8), image_size=8, in_chans=1, seed=0, affine=None)
samples.names = [str(number) for number in range(20_000)]
samples.kept = torch.zeros(1000)

if __name__ == "__main__":
    loader = DatasetLoader(samples, batch_size=2, seed=0, training=True, num_workers=3)
    first = DatasetLoader(samples, batch_size=2, seed=0, training=True, num_workers=1)
    next(first.epoch(0))  # waits for the fork server
    begin = time.monotonic()
    batches = loader.epoch(0)
    waited = time.monotonic() - begin
    assert waited < 4, f"the start of three workers took {waited:.1f} s, and each imports this file in 4 s"
    next(batches)
    assert samples.kept.is_shared(), "a tensor of the data set was copied to the workers"
"""


def test_workers__end_with_their_loader(monkeypatch):
    """Also if it dies in a garbage cycle, as a loader does that the traceback of an error refers to."""
    loader = digits.build(image_size=8, in_chans=1, seed=0, batch_size=64, num_workers=2).train
    batches = loader.epoch(0)
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) >= 2
    loader.cycle = [loader, batches]
    del loader, batches
    patience = 60  # seconds; torch's DataLoader waits 5 for each worker, which a busy machine may exceed
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", patience)
    start = time.perf_counter()
    gc.collect()
    assert time.perf_counter() - start < patience
    assert not any(worker.is_alive() for worker in workers)


def test_workers__end_with_a_killed_training_process():
    """They inherit its standard output, so reading that ends only after all of them have ended."""
    command = [sys.executable, "-c", KILLED]
    run = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120)
    assert run.returncode == -signal.SIGKILL and run.stdout == "training\n", run.stderr


def test_workers__their_fork_server_starts_with_the_loader_and_not_with_its_first_epoch():
    subprocess.run([sys.executable, "-c", FORK_SERVER], check=True, timeout=120)


def test_workers__import_the_main_module_at_the_same_time(tmp_path):
    """A pipe does not hold these samples, so that Process.start() would wait for each worker to read them."""
    main = tmp_path / "slow_main.py"
    main.write_text(SLOW_MAIN)
    subprocess.run([sys.executable, main], check=True, timeout=120)


def test_workers__more_than_the_machine_can_use_are_refused_before_any_starts(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(2), raising=False)
    with error("data.value", setting="num_workers", value=500):
        digits.build(image_size=8, in_chans=1, seed=0, batch_size=64, num_workers=500)
    assert not multiprocessing.active_children()


def test_worker_count__auto_divides_the_cores_among_local_ranks(monkeypatch):
    monkeypatch.setattr(workers, "usable_cores", lambda: 16)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert workers.worker_count("auto") == 16 and workers.worker_count(3) == 3 and workers.worker_count(0) == 0
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert workers.worker_count("auto") == 2
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "32")
    assert workers.worker_count("auto") == 1
