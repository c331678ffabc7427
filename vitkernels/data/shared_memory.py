"""Shared memory through which data workers hand batches over to the training process."""

import math
import os

import torch
from torch import Tensor
from torch.utils.data import get_worker_info

_MOST_KEPT = 3  # one is filled, one is read, and one waits
_IN_USE, _HANDED_BACK = 0, 1  # values of the last byte of recycled memory


def new_batch(*shape: int) -> Tensor:
    """Return an uninitialized uint8 tensor. In a worker it is in shared memory, where the DataLoader would copy it to.

    The operating system provides memory only for the pages that are written.
    """
    if get_worker_info() is None:
        return torch.empty(shape, dtype=torch.uint8)
    return torch.empty(0, dtype=torch.uint8).set_(_shared_memory(math.prod(shape))).view(shape)


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
