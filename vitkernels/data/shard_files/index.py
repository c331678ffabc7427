"""The index of a split: a memory-mapped file, so opening it takes no time and workers share its memory.

Shapes: N images of the split, M shards.
"""

import fcntl
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from safetensors.torch import load_file

from vitkernels.data.shard_files.contract import ShardFile, ShardSamples
from vitkernels.data.shard_files.fetch import Patience, fetch_if_there
from vitkernels.errors import UsageError
from vitkernels.files import write_atomically

log = logging.getLogger(__name__)

FORMAT = "vitkernels.shards.1"
THREADS = 8  # threads that index shards concurrently: reading waits for the disk
_LOG_EVERY = 20.0  # seconds

# Returns the samples of a shard, and its description with a checksum if it was fetched.
Indexer = Callable[[ShardFile], tuple[ShardFile, ShardSamples]]


@dataclass(frozen=True)
class Index:
    """The positions of a split's images in its shards; pickled as the path of its file.

    shards: in order; those of the images are a range of rows each, from starts[i] to starts[i + 1].
    offsets, lengths: of an image's bytes in its shard, int64 (N,). targets: int64 (N,). starts: int64 (M + 1,).
    """

    path: Path
    root: str
    digest: str
    shards: list[ShardFile]
    starts: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    targets: np.ndarray
    _name_ends: np.ndarray
    _names: np.ndarray

    def __reduce__(self) -> tuple:
        return _reopen, (self.path, self.root, self.digest)

    def __len__(self) -> int:
        return len(self.targets)

    def shard_of(self, index: int) -> int:
        """Return the number of the shard that holds an image."""
        return int(np.searchsorted(self.starts, index, side="right")) - 1

    def name(self, index: int) -> str:
        """Return the name of an image in its shard."""
        begin = self._name_ends[index - 1] if index else 0
        return self._names[begin : self._name_ends[index]].tobytes().decode(errors="surrogateescape")

    def of_shard(self, number: int) -> ShardSamples:
        """Return the samples of one shard."""
        rows = slice(int(self.starts[number]), int(self.starts[number + 1]))
        names = [self.name(index) for index in range(rows.start, rows.stop)]
        return ShardSamples(self.offsets[rows], self.lengths[rows], self.targets[rows], names)


def open_index(path: Path, root: str) -> Index | None:
    """Return the index in a file, or None if there is none, or one of another version of this package.

    root: location of the shards if the index does not contain it, because it was published with them.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
        if metadata.get("format") != FORMAT:
            return None
        columns = {name: tensor.numpy() for name, tensor in load_file(path).items()}
    except (FileNotFoundError, SafetensorError):
        return None
    shards = [ShardFile(**shard) for shard in json.loads(metadata["shards"])]
    shards = [
        shard if shard.location else replace(shard, location=f"{root.rstrip('/')}/{shard.name}") for shard in shards
    ]
    names = columns.pop("name_ends"), columns.pop("names")
    return Index(path, root, metadata["digest"], shards, **columns, _name_ends=names[0], _names=names[1])


def write_index(path: Path, shards: Sequence[ShardFile], samples: Sequence[ShardSamples]) -> None:
    """Write the index of these shards, atomically."""
    encoded = [name.encode(errors="surrogateescape") for shard in samples for name in shard.names]
    columns = {
        "starts": np.cumsum([0, *(len(shard.names) for shard in samples)]),
        "offsets": np.concatenate([shard.offsets for shard in samples]),
        "lengths": np.concatenate([shard.lengths for shard in samples]),
        "targets": np.concatenate([shard.targets for shard in samples]),
        "name_ends": np.cumsum([len(name) for name in encoded], dtype=np.int64),
        "names": np.frombuffer(b"".join(encoded), dtype=np.uint8),
    }
    listed = json.dumps([asdict(shard) for shard in shards])
    digest = hashlib.sha256(listed.encode())
    for column in columns.values():
        digest.update(column.tobytes())
    content = save(columns, {"format": FORMAT, "shards": listed, "digest": digest.hexdigest()})
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write(content))


def cached_index(path: Path, root: str, files: list[ShardFile], indexer: Indexer) -> Index:
    """Return the index of these shards, from its file as far as they are unchanged.

    New and changed shards are indexed; changed ones are logged. If several processes need the same index, one builds
    it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        index = open_index(path, root)
        if index is None or index.shards != files:
            _update(path, index, files, indexer)
            index = open_index(path, root)
    assert index is not None
    return index


def published(path: Path, url: str, root: str, patience: Patience) -> Index | None:
    """Return the index that is stored at a URL next to its shards, or None if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    kept, new = path.with_suffix(".safetensors"), path.with_suffix(".new")
    with open(path.with_suffix(".lock"), "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not fetch_if_there(url, new, patience):
            return None
        index, before = open_index(new, root), open_index(kept, root)
        if index is None:
            log.warning("%s is not an index that this version of the package can read: ignored", url)
            return None
        if before is None or before.digest != index.digest:  # processes that started earlier may open the old one
            os.replace(new, kept)
        else:
            new.unlink()
        return open_index(kept, root)


def _update(path: Path, old: Index | None, files: list[ShardFile], indexer: Indexer) -> None:
    known: dict[str, int] = {} if old is None else {shard.name: number for number, shard in enumerate(old.shards)}
    begin = last = time.monotonic()
    todo = []
    for file in files:
        before = old.shards[known[file.name]] if old is not None and file.name in known else None
        if before != file:
            todo.append(file)
            if before is not None:
                log.warning("%s changed since it was indexed (%s)", file.location, _change(before, file))
    samples: dict[str, tuple[ShardFile, ShardSamples]] = {}
    with ThreadPoolExecutor(THREADS) as threads:
        try:
            for file, found in zip(todo, threads.map(indexer, todo), strict=True):
                samples[file.name] = found
                if time.monotonic() - last > _LOG_EVERY:
                    last = time.monotonic()
                    log.info("indexed %d of %d shards", len(samples), len(todo))
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    pairs = [samples[file.name] if file.name in samples else _of(old, known[file.name]) for file in files]
    write_index(path, *zip(*pairs, strict=True))
    images = sum(len(shard.names) for _, shard in samples.values())
    log.info("indexed %d images in %d shards in %.1f s: %s", images, len(todo), time.monotonic() - begin, path)


def _of(old: Index | None, number: int) -> tuple[ShardFile, ShardSamples]:
    assert old is not None
    return old.shards[number], old.of_shard(number)


def _change(before: ShardFile, now: ShardFile) -> str:
    if before.size != now.size:
        return f"{before.size} bytes then, {now.size} now"
    return f"version {before.version} then, {now.version} now" if before.version != now.version else "moved"


def _reopen(path: Path, root: str, digest: str) -> Index:
    """Open the index that another process pickled."""
    index = open_index(path, root)
    if index is None or index.digest != digest:
        raise UsageError(
            f"the index {path} was rewritten while it was in use: resume the run from its newest checkpoint",
            code="data.shard_changed",
            path=str(path),
        )
    return index
