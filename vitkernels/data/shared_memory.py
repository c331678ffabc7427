"""How data workers and the training process hand data over: large data in shared memory, small tensors by value."""

import math
import os
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_MOST_KEPT = 3  # one is filled, one is read, and one waits
_SMALL = 2**16  # bytes, which a pipe holds at once
_PLAIN = (torch.bool, torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)  # dtypes that NumPy has
_IN_USE, _HANDED_BACK = 0, 1  # values of the last byte of recycled memory


def new_batch(*shape: int) -> Tensor:
    """Return an uninitialized uint8 tensor. In a worker it is in shared memory, where the DataLoader would copy it to.

    The operating system provides memory only for the pages that are written.
    """
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(_shared_memory(math.prod(shape))).view(shape)


def to_shared_memory(data: memoryview) -> Tensor:
    """Return a copy of the bytes, uint8, in shared memory."""
    copy = torch.empty(0, dtype=torch.uint8).set_(_shared_memory(len(data)))
    copy.numpy()[:] = data
    return copy


class RecycledMemory:
    """Memory of one worker's batches, which is used again after the training process has handed it back.

    New shared memory costs more than the copy into it: the operating system clears each page when it is first written.
    Memory that is not handed back is left to those who read it.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def take(self, size: int) -> Tensor:
        """Return uint8 (size,) or more, uninitialized; in shared memory if this is a worker."""
        if get_worker_info() is None:
            return torch.empty(size, dtype=torch.uint8)
        for memory in self._kept:
            if memory[-1] == _HANDED_BACK and len(memory) > size:
                break
        else:
            memory = new_batch(size + 1)
            self._kept = [*self._kept[1 - _MOST_KEPT :], memory]
        memory[-1] = _IN_USE
        return memory[:-1]


def hand_back(taken: Tensor) -> None:
    """Let the worker use memory of RecycledMemory.take again; taken: all or a part of it, in any process."""
    if taken.is_shared():
        torch.empty(0, dtype=torch.uint8).set_(taken.untyped_storage())[-1] = _HANDED_BACK


class Mappings:
    """Keeps the newest memory that workers took mapped into this process.

    Torch maps memory anew whenever it arrives, unless it is mapped: a page fault per 16 pages, and as much to unmap it.
    """

    def __init__(self, num_workers: int):
        self._most = _MOST_KEPT * num_workers
        self._kept: OrderedDict[int, torch.UntypedStorage] = OrderedDict()  # by address

    def keep(self, taken: Tensor) -> None:
        """Keep the memory of `taken` mapped, and forget what arrived least recently."""
        storage = taken.untyped_storage()
        self._kept[storage.data_ptr()] = storage
        self._kept.move_to_end(storage.data_ptr())
        while len(self._kept) > self._most:
            self._kept.popitem(last=False)


def by_value(value: Any) -> Any:
    """Return the value to be pickled in place of `value`: small tensors are then sent by value.

    Torch sends each tensor as a file descriptor, which takes 0.4 ms of the training process and as much of the worker.
    """
    is_small = isinstance(value, Tensor) and value.dtype in _PLAIN and value.nbytes <= _SMALL
    return _ByValue(value) if is_small else value


class _ByValue:
    """A tensor that is pickled by value."""

    def __init__(self, tensor: Tensor):
        self._tensor = tensor

    def __reduce__(self) -> tuple:
        return torch.from_numpy, (self._tensor.numpy(),)


def _shared_memory(size: int) -> torch.UntypedStorage:
    """Return shared memory. From 2.10 on, torch reserves all of it at once, in /dev/shm, which is often small."""
    if not hasattr(os, "memfd_create"):  # not Linux
        return torch.UntypedStorage._new_shared(size)
    file = os.memfd_create("batch")
    try:
        os.ftruncate(file, size)
        # It duplicates the file descriptor.
        return torch.UntypedStorage._new_shared_fd_cpu(file, size)  # type: ignore[attr-defined]  # defined in C++
    finally:
        os.close(file)
