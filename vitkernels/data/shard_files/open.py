"""Open the splits of a root: list its shards, index them, and choose how they are read."""

import hashlib
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vitkernels.data.shard_files import parquet
from vitkernels.data.shard_files.contract import Fields, ShardFile, ShardSamples
from vitkernels.data.shard_files.fetch import DEFAULT, Patience, fetch_if_there, is_url
from vitkernels.data.shard_files.index import Index, cached_index, published
from vitkernels.data.shard_files.listing import list_shards, published_index
from vitkernels.data.shard_files.read import CLASS_NAMES, index_shard, is_parquet, read_class_names
from vitkernels.data.shard_files.source import ShardSource
from vitkernels.data.shard_files.store import FetchedStore, LocalStore, ShardCache
from vitkernels.errors import UsageError

PATTERNS = {"train": "*train*", "val": "*val*"}
_SPARE = 4  # shards of a split that the cache holds in addition to those in use and those fetched ahead
_EVALUATION_AHEAD = 4  # shards; an evaluation reads one after another


@dataclass(frozen=True)
class Place:
    """The location of a data set's shards, and of their indexes and fetched copies on this machine.

    root: path or URL; list_shards refuses others. folder: for indexes and fetched shards.
    limit: bytes of fetched shards to keep.
    """

    root: Any
    folder: Path
    limit: int = 100 * 10**9
    patience: Patience = DEFAULT

    @property
    def cache(self) -> ShardCache:
        return ShardCache(self.folder / "fetched", self.limit, self.patience)

    def kept(self, *key: object) -> Path:
        """Return the path, without suffix, of the local files for this root and key."""
        root = self.root if is_url(self.root) else os.path.abspath(self.root)
        return self.folder / "index" / hashlib.sha256(json.dumps([root, *key]).encode()).hexdigest()[:24]


def open_splits(
    place: Place, patterns: dict[str, str], fields: Fields, window: int | None
) -> tuple[dict[str, ShardSource], list[str] | None]:
    """Return the images of each split, and the names of the classes if they are known.

    Raises UsageError for shards that are missing or cannot be read, and SourceError for a URL that fails.
    """
    indexes = _published(place, patterns) if is_url(place.root) and fields == Fields() else {}
    files = list_shards(
        place.root, {split: pattern for split, pattern in patterns.items() if split not in indexes}, place.patience
    )
    names = _class_names(place, fields, [shard for own in files.values() for shard in own])
    fields = replace(fields, classes=None if names is None else tuple(names))
    for split, own in files.items():
        key = (patterns[split], fields.image, fields.label, fields.classes)
        indexer = _fetching_indexer(place.cache, fields) if is_url(place.root) else _local_indexer(fields)
        indexes[split] = cached_index(place.kept(*key).with_suffix(".safetensors"), place.root, own, indexer)
    if is_url(place.root):
        _check_room(place, indexes, window)
    return {split: _source(place, split, indexes[split], window) for split in patterns}, names


def _source(place: Place, split: str, index: Index, window: int | None) -> ShardSource:
    name = f"{place.root} ({split})"
    if not is_url(place.root):
        return ShardSource(name, index, LocalStore(index), window)
    ahead = _at_a_time(index, window) if split == "train" else _EVALUATION_AHEAD
    return ShardSource(name, index, FetchedStore(index, place.cache, ahead), window)


def _published(place: Place, patterns: dict[str, str]) -> dict[str, Index]:
    """Return the indexes that `vitkernels data shard` stored next to the shards, of splits with the usual patterns."""
    found: dict[str, Index] = {}
    for split, pattern in patterns.items():
        if pattern == PATTERNS.get(split):
            url = f"{place.root.rstrip('/')}/{published_index(split)}"
            index = published(place.kept(split), url, place.root, place.patience)
            found |= {} if index is None else {split: index}
    return found


def _class_names(place: Place, fields: Fields, shards: list[ShardFile]) -> list[str] | None:
    """Return the class names from the root's class_names.json, else from a Parquet shard, else None."""
    if is_url(place.root):
        path = place.kept(CLASS_NAMES).with_suffix(".json")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # may have been removed there
        fetch_if_there(f"{place.root.rstrip('/')}/{CLASS_NAMES}", path, place.patience)
    else:
        path = Path(place.root) / CLASS_NAMES
    names = read_class_names(path)
    if names is not None or not shards or not is_parquet(shards[-1]):
        return names
    if not is_url(place.root):
        return parquet.class_names(shards[-1].location, fields)
    place.cache.fetched(shards[-1])
    return parquet.class_names(str(place.cache.path(shards[-1])), fields)


def _local_indexer(fields: Fields) -> Callable[[ShardFile], tuple[ShardFile, ShardSamples]]:
    return lambda file: (file, index_shard(file, fields))


def _fetching_indexer(cache: ShardCache, fields: Fields) -> Callable[[ShardFile], tuple[ShardFile, ShardSamples]]:
    def indexer(file: ShardFile) -> tuple[ShardFile, ShardSamples]:
        opened = cache.fetched(file)
        assert opened is not None, "fetched waits unless ahead is set"
        here = replace(file, location=str(cache.path(file)))
        try:
            return replace(file, sha256=opened.sha256()), index_shard(here, fields)
        except UsageError as error:
            here_named = str(error).replace(here.location, file.location)
            raise UsageError(here_named, code=error.code, **{**error.fields, "path": file.location}) from error

    return indexer


def _at_a_time(index: Index, window: int | None) -> int:
    """Return the number of shards that a window reads."""
    count = len(index.shards)
    return count if window is None else min(count, math.ceil(window * count / len(index)) + 1)


def _check_room(place: Place, indexes: dict[str, Index], window: int | None) -> None:
    """Raise UsageError if the cache is too small for what is in use and what is fetched ahead."""
    needed = 0
    for split, index in indexes.items():
        sizes = sorted((shard.size for shard in index.shards), reverse=True)
        held = 2 * _at_a_time(index, window) if split == "train" else _EVALUATION_AHEAD
        needed += sum(sizes[: held + _SPARE])
    if needed > place.limit:
        how = "all shards, since window=null shuffles all images" if window is None else "the shards of two windows"
        raise UsageError(
            f"cache_gb={place.limit / 1e9:g} is too small: it has to hold {how}, {needed / 1e9:.3g} GB. Raise it, or "
            "set a smaller window, such as window=20000",
            code="data.cache_gb",
            cache_gb=place.limit / 1e9,
            needed_gb=needed / 1e9,
        )
