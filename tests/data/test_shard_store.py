"""The order in which a store of fetched shards prefetches."""

import time
from types import SimpleNamespace

import numpy as np

from vitkernels.data.shard_files.store import FetchedStore


class RecordingCache:
    """In place of a ShardCache: notes which shards are fetched ahead, and keeps none."""

    def __init__(self):
        self.ahead = []

    def fetched(self, shard, ahead=False):
        if ahead:
            self.ahead.append(shard)
        return shard


def test_store__each_evaluation_prefetches():
    cache = RecordingCache()
    store = FetchedStore(SimpleNamespace(shards=range(6)), cache, ahead=2)
    for _ in range(3):
        cache.ahead.clear()
        for number in range(6):
            store.open(number)
            deadline = time.monotonic() + 10
            while cache.ahead[-1:] != [min(number + 2, 5)] and time.monotonic() < deadline:
                time.sleep(0.001)
            assert cache.ahead[-1] == min(number + 2, 5)
        assert set(cache.ahead) == {1, 2, 3, 4, 5}


def test_store__training_prefetches_from_its_furthest_place():
    store = FetchedStore(SimpleNamespace(shards=range(6), starts=np.arange(0, 70, 10)), RecordingCache(), ahead=2)
    store.expect(np.array([45, 5, 15, 41, 6, 25, 35, 55]))  # shards 4, 0, 1, 4, 0, 2, 3, 5
    for number, furthest in ((4, 0), (0, 1), (1, 2), (4, 2), (0, 2), (2, 3)):
        store.open(number)
        assert store._furthest == furthest
