"""Index a shard of either format, and read the class names next to the shards."""

import json
from pathlib import Path

from vitkernels.data.shard_files import parquet
from vitkernels.data.shard_files.contract import Fields, ShardFile, ShardSamples
from vitkernels.data.shard_files.tar import index_tar
from vitkernels.errors import UsageError

CLASS_NAMES = "class_names.json"  # in the root: a list of names


def index_shard(file: ShardFile, fields: Fields) -> ShardSamples:
    """Return the samples of a shard; UsageError if it cannot be read."""
    reader = parquet.index_parquet if is_parquet(file) else index_tar
    return reader(file.location, fields)


def read_class_names(path: Path) -> list[str] | None:
    """Return the names in a JSON file, or None if it does not exist. UsageError if it is not a list of names."""
    if not path.exists():
        return None
    try:
        names = json.loads(path.read_text())
    except ValueError:
        names = None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"{path} is not a JSON list of class names", code="data.class_names", path=str(path))
    return names


def is_parquet(file: ShardFile) -> bool:
    """Return whether a shard is a Parquet file, by its name."""
    return file.location.lower().endswith(".parquet")
