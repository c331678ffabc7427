"""Shard files: tar files in WebDataset's layout, or Parquet files as on the Hugging Face hub."""

import hashlib
import json
import logging
import os
from pathlib import Path

from vitkernels.data.checks import check_number
from vitkernels.data.contract import Data
from vitkernels.data.images import ImageSettings
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.shard_files.contract import Fields
from vitkernels.data.shard_files.index import Index, cached_index
from vitkernels.data.shard_files.listing import list_shards
from vitkernels.data.shard_files.read import CLASS_NAMES, index_shard, read_class_names
from vitkernels.data.shard_files.source import ShardSource
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)


@data_set
def build(
    spec: InputSpec,
    images: ImageSettings,
    *,
    root: str | None = None,
    train_shards: str = "*train*",
    val_shards: str = "*val*",
    image: str | None = None,
    label: str | None = None,
    num_classes: int | None = None,
    window: int | None = None,
    cache: str | None = None,
) -> Data:
    """Return images float32 (B, 3, image_size, image_size) of shard files.

    With spec.train=False, only val_shards must exist. conf/data/shards.yaml explains the arguments. Raises UsageError,
    before any image is decoded, for shards that cannot be read and for invalid values.
    """
    check_number("window", window, 1, integer=True, null=True)
    check_number("num_classes", num_classes, 2, integer=True, null=True)

    def open_shards() -> tuple[dict[str, ShardSource], int, list[str] | None]:
        patterns = {"train": train_shards, "val": val_shards} if spec.train else {"val": val_shards}
        files = list_shards(root, patterns)
        fields = Fields(image, label)
        names = read_class_names(Path(str(root)).expanduser(), files["val"][0], fields)
        fields = Fields(image, label, None if names is None else tuple(names))
        sources = {}
        for split, own in files.items():
            path = _index_path(cache_folder(cache), str(root), patterns[split], fields)
            sources[split] = ShardSource(f"{root} ({split})", cached_index(path, own, fields, index_shard), window)
        count = _count_classes({split: source.index for split, source in sources.items()}, num_classes, names)
        return sources, count, names

    return images.build(spec, open_shards, log)


def cache_folder(given: str | None) -> Path:
    """Return the folder of indexes; None is vitkernels/shards below $XDG_CACHE_HOME, or below ~/.cache."""
    if given is not None:
        return Path(given).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vitkernels" / "shards"


def _index_path(folder: Path, root: str, pattern: str, fields: Fields) -> Path:
    key = json.dumps([os.path.abspath(os.path.expanduser(root)), pattern, fields.image, fields.label, fields.classes])
    return folder / "index" / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.safetensors"


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
