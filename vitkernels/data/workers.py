"""Worker processes that make batches ahead, through torch's DataLoader."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, default_convert

from vitkernels import torchrun_environment
from vitkernels.data.checks import usable_cores
from vitkernels.data.samples import SampleBatches
from vitkernels.data.shared_memory import by_value, to_shared_memory


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
        _InSharedMemory(batches),
        **common,
        num_workers=num_workers,
        persistent_workers=True,
        multiprocessing_context=process_context(),
        worker_init_fn=_start_worker,
        collate_fn=_small_by_value,
    )


def iterate(dataloader: DataLoader) -> Iterator:
    """Return an iterator over the DataLoader's current keys. The first call starts the workers."""
    iterator = iter(dataloader)
    if isinstance(dataloader.dataset, _InSharedMemory):
        dataloader.dataset.release()
    return iterator


class _InSharedMemory(Dataset):
    """SampleBatches that all workers read from the same shared memory, pickled once.

    By default, Process.start() would write the pickled data set to a pipe, which holds 64 KB. It would wait until the
    worker has imported the main module, because the worker reads the data set afterwards. So the workers would import
    it one after another.
    """

    def __init__(self, batches: SampleBatches):
        self._batches = batches
        self._pickled: tuple[torch.Tensor, list[torch.Tensor]] | None = None

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return self._batches[key]

    def release(self) -> None:
        """Free the pickled data set; call it when the workers have started."""
        self._pickled = None

    def __getstate__(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        if self._pickled is None:
            buffer = io.BytesIO()
            pickler = _TensorsApart(buffer)
            pickler.dump(self._batches)
            self._pickled = to_shared_memory(buffer.getbuffer()), pickler.tensors
        return self._pickled

    def __setstate__(self, state: tuple[torch.Tensor, list[torch.Tensor]]) -> None:
        pickled, tensors = state
        self._batches = _TensorsByNumber(io.BytesIO(pickled.numpy().data), tensors).load()
        self._pickled = None


class _TensorsByNumber(pickle.Unpickler):
    """Reads what _TensorsApart wrote."""

    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, number: int) -> torch.Tensor:
        return self._tensors[number]


class _TensorsApart(pickle.Pickler):
    """A pickler that collects tensors, which torch shares with each worker, and pickles their numbers instead."""

    def __init__(self, file: io.BytesIO):
        super().__init__(file, pickle.HIGHEST_PROTOCOL)
        self.tensors: list[torch.Tensor] = []

    def persistent_id(self, value: Any) -> int | None:
        if not isinstance(value, torch.Tensor):
            return None
        self.tensors.append(value)
        return len(self.tensors) - 1


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
