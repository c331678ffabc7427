"""Random numbers that depend on a key alone, never on earlier draws: the basis of exact resume."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch
from torch.utils.data import get_worker_info

from vitkernels.runtime.generators import GENERATORS


class Stream(IntEnum):
    """The use of the numbers; part of the key, so no two uses share numbers."""

    ORDER = 0
    SAMPLE = 1
    MIX = 2
    POOL = 3


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """Return the NumPy generator of (seed, stream, *key), all of them non-negative integers."""
    return np.random.default_rng((seed, stream, *key))


@contextmanager
def seeded_globals(seed: int, stream: Stream, *key: int) -> Iterator[None]:
    """Seed the global generators of random, numpy and torch (CPU) from (seed, stream, *key); restore them at the end.

    For code that draws from the global generators, as timm's and torchvision's transforms do. A loader without workers
    thereby leaves the training process's streams unchanged. In a data worker they are not restored: nothing else draws
    from them, and restoring takes 6 % of the worker's time. Threads take turns, but one that draws without this
    function gets numbers of this seed, because generators are global to the process.
    """
    in_worker = get_worker_info() is not None
    with GENERATORS:
        before = None if in_worker else (random.getstate(), np.random.get_state(), torch.get_rng_state())
        words = np.random.SeedSequence((seed, stream, *key)).generate_state(3)
        random.seed(int(words[0]))
        np.random.seed(int(words[1]))
        torch.default_generator.manual_seed(int(words[2]))  # torch.manual_seed would seed the accelerators as well
        try:
            yield
        finally:
            if before is not None:
                random.setstate(before[0])
                np.random.set_state(before[1])
                torch.set_rng_state(before[2])
