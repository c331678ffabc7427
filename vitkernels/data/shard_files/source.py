"""The images of a split of shards, as an ImageSource."""

import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from vitkernels.data.image_source import SourceError
from vitkernels.data.shard_files.contract import ShardFile
from vitkernels.data.shard_files.index import Index
from vitkernels.data.shard_files.order import windowed_order

OPEN_FILES = 64  # in each process


@dataclass(frozen=True)
class ShardSource:
    """The images of an index's shards.

    window: number of images that are shuffled together; None shuffles all.
    """

    name: str
    index: Index
    window: int | None = None

    @property
    def targets(self) -> np.ndarray:
        return self.index.targets

    def describe(self, index: int) -> str:
        """Return the path of the shard and the name of the image in it."""
        return f"{self.index.shards[self.index.shard_of(index)].location}: {self.index.name(index)}"

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Return the bytes of an image, or its first `limit` bytes, by one read.

        SourceError "data.shard_changed" if the shard was rewritten since it was indexed.
        """
        shard = self.index.shards[self.index.shard_of(index)]
        length = int(self.index.lengths[index])
        wanted = length if limit is None else min(limit, length)
        data = os.pread(_open(shard).descriptor, wanted, int(self.index.offsets[index]))
        if len(data) < wanted:
            raise _changed(shard, f"{self.index.name(index)} continues after its last byte")
        return data

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return the order of an epoch."""
        return windowed_order(draw, self.index.starts, self.window)


class _OpenFile:
    """A descriptor that is closed with its last reference: other threads may read while the cache drops it."""

    def __init__(self, path: str):
        self.descriptor = os.open(path, os.O_RDONLY)

    def __del__(self) -> None:
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)


@lru_cache(OPEN_FILES)
def _open(shard: ShardFile) -> _OpenFile:
    try:
        file = _OpenFile(shard.location)
    except FileNotFoundError as error:
        raise _changed(shard, "it is gone") from error
    stat = os.fstat(file.descriptor)
    if stat.st_size != shard.size:
        raise _changed(shard, f"{shard.size} bytes then, {stat.st_size} now")
    if shard.version and str(stat.st_mtime_ns) != shard.version:
        raise _changed(shard, f"modified at {shard.version} ns then, {stat.st_mtime_ns} ns now")
    return file


def _changed(shard: ShardFile, how: str) -> SourceError:
    return SourceError(
        f"{shard.location} changed since it was indexed ({how}). Restore it, or start again to index it anew; a run "
        "that resumes on other images is not exact",
        code="data.shard_changed",
        path=shard.location,
        how=how,
    )
