"""The images of a split of shards, as an ImageSource."""

import os
from dataclasses import dataclass

import numpy as np

from vitkernels.data.image_source import evenly_spaced
from vitkernels.data.shard_files.index import Index
from vitkernels.data.shard_files.order import windowed_order
from vitkernels.data.shard_files.store import Store, changed


@dataclass(frozen=True)
class ShardSource:
    """The images of an index's shards.

    store: opens the shards. window: number of images that are shuffled together; None shuffles all.
    """

    name: str
    index: Index
    store: Store
    window: int | None = None

    @property
    def targets(self) -> np.ndarray:
        return self.index.targets

    def describe(self, index: int) -> str:
        """Return the path of the shard and the name of the image in it."""
        return f"{self.index.shards[self.index.shard_of(index)].location}: {self.index.name(index)}"

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Return the bytes of an image, or its first `limit` bytes, by one read.

        SourceError if the shard is not the one that was indexed, or cannot be opened or fetched.
        """
        number = self.index.shard_of(index)
        length = int(self.index.lengths[index])
        wanted = length if limit is None else min(limit, length)
        file = self.store.open(number, ahead=limit is None)
        try:
            data = os.pread(file.descriptor, wanted, int(self.index.offsets[index]))
        except OSError:
            self.store.forget_open_files()  # so that the next attempt opens the file again: this one may be stale
            raise
        if len(data) < wanted:
            raise changed(self.index.shards[number], f"{self.index.name(index)} continues after its last byte")
        return data

    def spread(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced images of the shards that can be opened without waiting."""
        shards = self.store.at_hand()
        if shards is None:
            return evenly_spaced(len(self.index), count).tolist()
        starts = self.index.starts
        images = np.concatenate([np.arange(starts[shard], starts[shard + 1]) for shard in shards])
        return images[evenly_spaced(len(images), count)].tolist()

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return the order of an epoch."""
        order = windowed_order(draw, self.index.starts, self.window)
        self.store.expect(order)
        return order
