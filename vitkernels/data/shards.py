"""Shard files: tar files in WebDataset's layout, or Parquet files as on the Hugging Face hub."""

import logging
import os
from pathlib import Path

from vitkernels.data.checks import check_number
from vitkernels.data.contract import Data
from vitkernels.data.images import ImageSettings
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.shard_files.contract import Fields
from vitkernels.data.shard_files.fetch import Patience, is_url
from vitkernels.data.shard_files.index import Index
from vitkernels.data.shard_files.open import PATTERNS, Place, open_splits
from vitkernels.data.shard_files.read import CLASS_NAMES
from vitkernels.data.shard_files.source import ShardSource
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)


@data_set
def build(
    spec: InputSpec,
    images: ImageSettings,
    *,
    root: str | None = None,
    train_shards: str = PATTERNS["train"],
    val_shards: str = PATTERNS["val"],
    image: str | None = None,
    label: str | None = None,
    num_classes: int | None = None,
    window: int | None = None,
    cache: str | None = None,
    cache_gb: float = 100.0,
    patience: float = 600.0,
) -> Data:
    """Return images float32 (B, 3, image_size, image_size) of shard files.

    With spec.train=False, only val_shards must exist. conf/data/shards.yaml explains the arguments. Raises UsageError,
    before any image is decoded, for shards that cannot be read and for invalid values; SourceError for a URL that
    fails.
    """
    check_number("window", window, 1, integer=True, null=True)
    check_number("num_classes", num_classes, 2, integer=True, null=True)
    check_number("cache_gb", cache_gb, 0)
    check_number("patience", patience, 0)
    path = root if is_url(root) or not isinstance(root, str | os.PathLike) else os.path.expanduser(root)
    place = Place(path, cache_folder(cache), int(cache_gb * 1e9), Patience(patience))

    def open_shards() -> tuple[dict[str, ShardSource], int, list[str] | None]:
        patterns = {"train": train_shards, "val": val_shards} if spec.train else {"val": val_shards}
        sources, names = open_splits(place, patterns, Fields(image, label), window)
        count = _count_classes({split: source.index for split, source in sources.items()}, num_classes, names)
        return sources, count, names

    return images.build(spec, open_shards, log)


def cache_folder(given: str | None) -> Path:
    """Return the folder of indexes and fetched shards; None is vitkernels/shards below $XDG_CACHE_HOME or ~/.cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkernels" / "shards"


def _count_classes(indexes: dict[str, Index], given: int | None, names: list[str] | None) -> int:
    """Return the number of classes. UsageError if labels are beyond it."""
    found = max(int(index.targets.max()) for index in indexes.values()) + 1
    known = given or (len(names) if names else max(2, found))
    if found > known or (names and known != len(names)):
        raise UsageError(
            f"the shards have labels up to {found - 1}, but there are "
            + (f"{len(names)} class names and " if names else "")
            + f"num_classes={given}: set num_classes to the number of classes, or correct {CLASS_NAMES}",
            code="data.num_classes",
            num_classes=given,
            largest=found - 1,
        )
    return known
