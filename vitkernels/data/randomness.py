"""Random numbers that depend on a key alone, never on what was drawn before: the ground of exact resuming."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import numpy as np
import torch


class Stream(IntEnum):
    """What the numbers are for; it is part of the key, so that no two uses share their numbers."""

    ORDER = 0
    SAMPLE = 1
    MIX = 2
    POOL = 3


def generator(seed: int, stream: Stream, *key: int) -> np.random.Generator:
    """A NumPy generator of its own for (seed, stream, *key), all of them non-negative integers."""
    return np.random.default_rng((seed, stream, *key))


@contextmanager
def seeded_globals(seed: int, stream: Stream, *key: int) -> Iterator[None]:
    """Inside, the global generators of random, numpy and torch (CPU) follow from (seed, stream, *key) alone.

    For code that draws from the global generators, as timm's and torchvision's transforms do. On the way out all three
    are put back as they were, so a loader without workers leaves the streams of the training process alone. Generators
    are global to a process: threads that draw from them meanwhile would disturb one another.
    """
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence((seed, stream, *key)).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))  # torch.manual_seed would seed the accelerators as well
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
