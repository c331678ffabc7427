import random
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vitkernels.data.randomness import Stream, generator, seeded_globals

keys = st.lists(st.integers(0, 2**40), min_size=1, max_size=3)


def draws():
    return random.random(), np.random.rand(), torch.rand(()).item()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**63), key=keys, history=st.integers(0, 2**31))
def test_seeded_globals__draws_depend_on_the_key_alone(seed, key, history):
    random.seed(history), np.random.seed(history), torch.manual_seed(history)
    with seeded_globals(seed, Stream.SAMPLE, *key):
        first = draws()
    draws()
    with seeded_globals(seed, Stream.SAMPLE, *key):
        assert draws() == first
    with seeded_globals(seed, Stream.MIX, *key):
        assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_seeded_globals__restores_the_global_generators(rng_state):
    before = rng_state()
    with seeded_globals(0, Stream.SAMPLE, 1):
        draws()
        assert rng_state() != before
    assert rng_state() == before


def test_seeded_globals__restores_after_an_error(rng_state):
    before = rng_state()
    with pytest.raises(KeyError), seeded_globals(0, Stream.SAMPLE, 1):
        draws()
        raise KeyError
    assert rng_state() == before


def test_seeded_globals__threads_take_turns(rng_state):
    def drawn(number):
        found = []
        for _ in range(20):
            with seeded_globals(0, Stream.SAMPLE, number):
                found.append((draws(), time.sleep(1e-4), draws()))
        return found

    before, expected = rng_state(), [drawn(number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        assert [*threads.map(drawn, range(4))] == expected
    assert rng_state() == before


def test_generator__differs_by_key():
    values = {generator(seed, stream, n).random() for seed in range(3) for stream in Stream for n in range(3)}
    assert len(values) == 3 * len(Stream) * 3
