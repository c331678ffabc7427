"""Worker processes that make batches ahead, through torch's DataLoader."""

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, default_convert

from vitkernels import torchrun_environment
from vitkernels.data.checks import usable_cores
from vitkernels.data.samples import SampleBatches
from vitkernels.data.shared_memory import by_value


def worker_count(num_workers: int | str) -> int:
    """Return the number of workers; "auto" is one per usable CPU core, divided by torchrun's processes on this host."""
    if num_workers != "auto":
        return int(num_workers)
    return max(1, usable_cores() // torchrun_environment.local_world_size())


def dataloader(batches: SampleBatches, keys: list[tuple[int, int]], num_workers: int, pin_memory: bool) -> DataLoader:
    """Return a DataLoader whose items are finished batches (batch_size=None), since mixing needs a batch's number.

    keys: the (epoch, batch) pairs to load; read whenever an iterator is created.
    """
    # A separate generator: by default the DataLoader draws its workers' seed from the training process's stream.
    common: dict[str, Any] = {"batch_size": None, "sampler": keys, "pin_memory": pin_memory}
    common["generator"] = torch.Generator()
    if num_workers == 0:
        return DataLoader(batches, **common)
    return DataLoader(
        batches,
        **common,
        num_workers=num_workers,
        persistent_workers=True,
        multiprocessing_context=process_context(),
        worker_init_fn=_start_worker,
        collate_fn=_small_by_value,
    )


def _small_by_value(made: Any) -> Any:
    """Return what SampleBatches made, with small tensors to be sent by value; runs in the workers."""
    if not isinstance(made, tuple):  # a SourceError
        return made
    batch, problems = default_convert(made[0]), made[1]
    if isinstance(batch, dict):
        return {name: by_value(value) for name, value in batch.items()}, problems
    return tuple(map(by_value, batch)), problems


def is_from_dead_worker(error: Exception) -> bool:
    """Return whether an error of a DataLoader means that a worker died, rather than that its work failed.

    Torch reports a dead worker by a RuntimeError, unless it dies while it hands over a batch: then only their
    connection breaks, in the thread that pins memory if there is one.
    """
    if isinstance(error, RuntimeError):
        return str(error).startswith(("DataLoader worker (pid", "Pin memory thread exited unexpectedly"))
    return "in DataLoader worker process" not in str(error)  # else the worker's own code raised it


def process_context() -> multiprocessing.context.BaseContext:
    """Return a context whose workers inherit neither threads nor signal handlers of the training process, as forks do.

    The fork server imports heavy packages once for all workers. It starts now, so that it imports them while the
    calling process builds the model. (It preloads none of this project's modules: it looks for them in the current
    folder, which may hold an unrelated folder `data`.)
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in ("torch", "torchvision", "timm.data") if name in sys.modules])
    forkserver.ensure_running()
    return context


def _start_worker(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal; only the training process may stop the workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_exit_with_training, daemon=True).start()


def _exit_with_training() -> None:
    """Exit when the training process does: torch watches the parent, which is the fork server and may outlive it."""
    training = multiprocessing.parent_process()
    assert training is not None
    training.join()
    os._exit(1)
