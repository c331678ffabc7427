"""Open shards as local files: in place, or in a bounded cache of fetched shards.

Each process has its own store. The processes of a machine share the cache's folder and coordinate by lock files in it.
"""

import contextlib
import fcntl
import hashlib
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from vitkernels.data.image_source import SourceError, cannot_read
from vitkernels.data.shard_files.contract import ShardFile
from vitkernels.data.shard_files.fetch import Patience, fetch
from vitkernels.data.shard_files.index import Index
from vitkernels.data.shard_files.order import shard_sequence

OPEN_FILES = 64  # in each process
_ABANDONED = 3600 * 10**9  # age in ns at which a partial file must come from a process that died


class OpenFile:
    """A descriptor that is closed with its last reference: other threads may read while a cache drops it."""

    def __init__(self, path: str | Path):
        self.descriptor = os.open(path, os.O_RDONLY)

    def sha256(self) -> str:
        """Return the checksum of the content."""
        with open(self.descriptor, "rb", closefd=False) as file:
            file.seek(0)
            return hashlib.file_digest(file, "sha256").hexdigest()

    def __del__(self) -> None:
        if "descriptor" in self.__dict__:
            os.close(self.descriptor)


class Store(Protocol):
    """Opens shards by their number; picklable, and safe to use from several threads."""

    def open(self, number: int, ahead: bool = True) -> OpenFile:
        """Return the open file of a shard.

        ahead: whether the shards after it will also be needed.

        Raises SourceError if it is not the file that was indexed, or cannot be read or fetched.
        """

    def forget_open_files(self) -> None:
        """Open every file again when it is next needed."""

    def expect(self, order: np.ndarray) -> None:
        """Prepare for an epoch that reads the images in this order, int64 (N,)."""

    def at_hand(self) -> list[int] | None:
        """Return the shards that can be opened without waiting; None if all can."""


class LocalStore:
    """Shards in local files."""

    def __init__(self, index: Index):
        self.index = index

    def open(self, number: int, ahead: bool = True) -> OpenFile:
        return _open_local(self.index.shards[number])

    def forget_open_files(self) -> None:
        _open_local.cache_clear()

    def expect(self, order: np.ndarray) -> None:
        pass

    def at_hand(self) -> None:
        return None


@lru_cache(OPEN_FILES)
def _open_local(shard: ShardFile) -> OpenFile:
    try:
        file = OpenFile(shard.location)
    except FileNotFoundError as error:
        raise changed(shard, "it no longer exists") from error
    except PermissionError as error:  # it concerns many images, unlike that of an image file
        raise cannot_read(shard.location, error) from error
    stat = os.fstat(file.descriptor)
    if stat.st_size != shard.size:
        raise changed(shard, f"{shard.size} bytes then, {stat.st_size} now")
    if shard.version and str(stat.st_mtime_ns) != shard.version:
        raise changed(shard, f"modified at {shard.version} ns then, {stat.st_mtime_ns} ns now")
    return file


class ShardCache:
    """A folder of fetched shards, at most `limit` bytes in total; the least recently opened are deleted first."""

    def __init__(self, folder: Path, limit: int, patience: Patience):
        self.folder, self.limit, self.patience = folder, limit, patience

    def path(self, shard: ShardFile) -> Path:
        """Return the path of a shard in the cache; each version of a shard has its own path."""
        key = hashlib.sha256(repr((shard.location, shard.size, shard.version)).encode()).hexdigest()[:24]
        return self.folder / f"{key}-{shard.location.rpartition('/')[2]}"

    def fetched(self, shard: ShardFile, ahead: bool = False) -> OpenFile | None:
        """Return the open file of a shard, fetched if needed. If several processes need the shard, one fetches it.

        ahead: try once, and return None if another process is fetching it.

        Raises SourceError like `fetch`, and data.cache if the folder cannot be used.
        """
        try:
            return self._fetched(shard, ahead)
        except OSError as error:
            raise SourceError(
                f"cannot keep shards in {self.folder} ({type(error).__name__}: {error}): repair the folder, or set "
                "cache to another one",
                code="data.cache",
                folder=str(self.folder),
            ) from error

    def _fetched(self, shard: ShardFile, ahead: bool) -> OpenFile | None:
        path = self.path(shard)
        with contextlib.suppress(FileNotFoundError):
            return self._opened(path)
        self.folder.mkdir(parents=True, exist_ok=True)
        patience = replace(self.patience, total=0.0) if ahead else self.patience
        with _locked(path.with_name(f"{path.name}.lock"), wait=not ahead) as mine:
            if not mine:
                return None
            with contextlib.suppress(FileNotFoundError):  # another process has fetched it meanwhile
                return self._opened(path)
            self._make_room(shard.size)
            fetch(shard.location, path, patience, size=shard.size, sha256=shard.sha256)
            return self._opened(path)

    def has(self, shard: ShardFile) -> bool:
        """Return whether a shard is in the cache."""
        return self.path(shard).exists()

    def _opened(self, path: Path) -> OpenFile:
        file = OpenFile(path)
        with contextlib.suppress(FileNotFoundError):
            os.utime(path)  # moves it to the end of the eviction order
        return file

    def _make_room(self, size: int) -> None:
        """Remove the least recently opened shards until `size` more bytes fit; open files stay readable."""
        with _locked(self.folder / ".eviction.lock", wait=True):
            entries = []
            for path in self.folder.iterdir():
                with contextlib.suppress(FileNotFoundError):
                    stat = path.stat()
                    entries.append((stat.st_mtime_ns, stat.st_size, path))
            total = sum(bytes_ for _, bytes_, _ in entries) + size
            for when, bytes_, path in sorted(entries, key=lambda entry: entry[0]):
                if total <= self.limit:
                    return
                age = time.time_ns() - when
                if path.suffix not in (".lock", ".tmp") or (path.suffix == ".tmp" and age > _ABANDONED):
                    path.unlink(missing_ok=True)
                    total -= bytes_


class FetchedStore:
    """Shards of a URL, through a cache; a thread fetches the next shards while earlier ones are read.

    ahead: number of shards to fetch ahead.
    """

    def __init__(self, index: Index, cache: ShardCache, ahead: int):
        self.index, self.cache, self.ahead = index, cache, ahead
        self._sequence = list(range(len(index.shards)))  # the order of an evaluation
        self._place = {number: number for number in self._sequence}
        self._shuffled = False
        self._furthest = 0
        self._open = lru_cache(OPEN_FILES)(self._open_one)
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None

    def __reduce__(self) -> tuple:  # a new process has no open files and no thread
        return FetchedStore, (self.index, self.cache, self.ahead)

    def expect(self, order: np.ndarray) -> None:
        numbers = shard_sequence(order, self.index.starts)
        with self._news:
            self._sequence, self._shuffled = numbers, True
            self._place = {number: place for place, number in enumerate(numbers)}
            self._furthest = 0

    def open(self, number: int, ahead: bool = True) -> OpenFile:
        if ahead:
            self._note(number)
        return self._open(number)

    def forget_open_files(self) -> None:
        self._open.cache_clear()

    def _note(self, number: int) -> None:
        """Tell the prefetch thread that a shard is being read."""
        with self._news:
            place = self._place.get(number, 0)
            # An evaluation reads in order, so a lower place begins another one; a shuffled epoch goes back and forth.
            self._furthest = max(self._furthest, place) if self._shuffled else place
            if self._thread is None:
                self._thread = threading.Thread(target=self._fetch_ahead, daemon=True, name="fetch shards ahead")
                self._thread.start()
            self._news.notify()

    def at_hand(self) -> list[int]:
        return [number for number, shard in enumerate(self.index.shards) if self.cache.has(shard)] or [0]

    def _open_one(self, number: int) -> OpenFile:
        found = self.cache.fetched(self.index.shards[number])
        assert found is not None, "fetched waits unless ahead is set"
        return found

    def _fetch_ahead(self) -> None:
        """Prefetch the shards that follow the furthest one read so far, until the process ends."""
        done: tuple[int, list[int]] | None = None
        while True:
            with self._news:
                while done == (self._furthest, self._sequence):
                    self._news.wait()
                furthest, sequence = done = self._furthest, self._sequence
            for number in sequence[furthest + 1 : furthest + 1 + self.ahead]:
                if self._furthest != furthest:
                    break  # the order of need has changed
                with contextlib.suppress(SourceError):  # the reader that needs the shard tries again, and reports it
                    self.cache.fetched(self.index.shards[number], ahead=True)


@contextlib.contextmanager
def _locked(path: Path, wait: bool) -> Iterator[bool]:
    """Hold a lock across processes and threads; yield False if it is taken and `wait` is False."""
    with open(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def changed(shard: ShardFile, how: str) -> SourceError:
    """Return the error for a shard that changed after it was indexed."""
    return SourceError(
        f"{shard.location} changed since it was indexed ({how}). Restore it, or start a new run, which indexes it "
        "again; resuming on other images would not be exact",
        code="data.shard_changed",
        path=shard.location,
        how=how,
    )
