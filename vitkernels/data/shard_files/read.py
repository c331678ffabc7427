"""Open a shard of either format, and what stands next to the shards."""

import json
from pathlib import Path

from vitkernels.data.shard_files import parquet
from vitkernels.data.shard_files.contract import Fields, ShardFile, ShardSamples
from vitkernels.data.shard_files.tar import index_tar
from vitkernels.errors import UsageError

CLASS_NAMES = "class_names.json"  # in the root: a list of names


def index_shard(file: ShardFile, fields: Fields) -> ShardSamples:
    """Return the samples of a shard; UsageError if it cannot be read."""
    reader = parquet.index_parquet if _is_parquet(file) else index_tar
    return reader(file.location, fields)


def read_class_names(root: Path, shard: ShardFile, fields: Fields) -> list[str] | None:
    """Return the names in root/class_names.json, else those that a Parquet shard states, else None."""
    path = root / CLASS_NAMES
    if not path.exists():
        return parquet.class_names(shard.location, fields) if _is_parquet(shard) else None
    try:
        names = json.loads(path.read_text())
    except ValueError:
        names = None
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise UsageError(f"{path} is not a JSON list of class names", code="data.class_names", path=str(path))
    return names


def _is_parquet(file: ShardFile) -> bool:
    return file.location.lower().endswith(".parquet")
