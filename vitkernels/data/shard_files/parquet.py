"""Index a Parquet file as on the Hugging Face hub: a column of image bytes, and one of labels.

The hub stores images without compression, so a file contains their bytes unchanged. pyarrow reads each image once, and
a search that starts at the end of the previous image finds its bytes in the file. The index thus holds only positions
that were verified.
"""

import json
import mmap
import os
from typing import Any

import numpy as np

from vitkernels.data.shard_files.contract import Fields, ShardSamples, truncated, unreadable
from vitkernels.errors import UsageError

_ROWS = 64  # rows in memory at a time
_MAGIC = b"PAR1"  # first and last bytes of a file


def index_parquet(path: str, fields: Fields) -> ShardSamples:
    """Return the samples of a Parquet file.

    Raises:
        UsageError: data.shard_truncated, data.shard_unreadable, data.shard_fields for missing columns or images,
            data.shard_label, data.shard_compressed, data.package without pyarrow.
    """
    file = _open(path)
    image, label = _columns(path, file.schema_arrow, fields)
    leaf = image if "." in image else f"{image}.bytes" if _is_struct(file.schema_arrow, image) else image
    rows: list[tuple[int, int, int]] = []
    with open(path, "rb") as raw, mmap.mmap(raw.fileno(), 0, access=mmap.ACCESS_READ) as view:
        for group in range(file.metadata.num_row_groups):
            begin, end = _extent(file.metadata.row_group(group), leaf)
            place = begin
            for batch in file.iter_batches(_ROWS, [group], [leaf, label]):
                for value, found in zip(_values(batch, leaf), batch.column(label).to_pylist(), strict=True):
                    where = f"{path}: row {len(rows)}"
                    if not value:
                        raise _fields(path, f"{where} has no image bytes in column {leaf!r}", [])
                    at = view.find(value, place, end)
                    if at < 0:  # equal images are stored once, in the dictionary
                        at = view.find(value, begin, end)
                    if at < 0:
                        raise _compressed(path, leaf)
                    place = max(place, at + len(value))
                    rows.append((at, len(value), fields.class_number(found, where)))
    if not rows:
        raise _fields(path, f"{path} has no rows", [])
    offsets, lengths, targets = np.array(rows, dtype=np.int64).T
    return ShardSamples(offsets, lengths, targets, [str(row) for row in range(len(rows))])


def class_names(path: str, fields: Fields) -> list[str] | None:
    """Return the class names that the `datasets` library wrote to a Parquet file, or None."""
    schema = _open(path).schema_arrow
    described = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    feature = described.get("info", {}).get("features", {}).get(fields.label or "label", {})
    return feature.get("names") if isinstance(feature, dict) else None


def _open(path: str) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        message = "Parquet files need pyarrow, which is not installed: pip install 'vitkernels[shards]'"
        raise UsageError(message, code="data.package", package="pyarrow") from error
    with open(path, "rb") as file:
        head, size = file.read(4), os.fstat(file.fileno()).st_size
        file.seek(max(0, size - 4))
        tail = file.read(4)
    if head != _MAGIC:
        raise unreadable(path, "it is not a Parquet file")
    if tail != _MAGIC or size < 12:
        raise truncated(path, f"it ends at byte {size} without the metadata that ends a Parquet file")
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(path, error) from error


def _columns(path: str, schema: Any, fields: Fields) -> tuple[str, str]:
    """Return the names of the columns of images and labels."""
    images = [name for name in schema.names if _holds_images(schema, name)]
    image = fields.image or (images[0] if len(images) == 1 or "image" not in images else "image") if images else None
    image, label = fields.image or image, fields.label or "label"
    if image is None or image.split(".")[0] not in schema.names:
        hint = f"no column {image!r}" if image else "no column of image bytes"
        message = f"{path} has {hint} (columns: {', '.join(schema.names)}): set image to the column's name"
        raise _fields(path, message, schema.names)
    if label not in schema.names:
        message = (
            f"{path} has no column {label!r} (columns: {', '.join(schema.names)}): set label to the column of classes"
        )
        raise _fields(path, message, schema.names)
    return image, label


def _is_struct(schema: Any, name: str) -> bool:
    return str(schema.field(name).type).startswith("struct<")


def _holds_images(schema: Any, name: str) -> bool:
    kind = str(schema.field(name).type)
    return kind in ("binary", "large_binary") or (kind.startswith("struct<") and "bytes: binary" in kind)


def _values(batch: Any, leaf: str) -> list[bytes | None]:
    column, _, field = leaf.partition(".")
    values = batch.column(column)
    return (values.field(field) if field else values).to_pylist()


def _extent(group: Any, leaf: str) -> tuple[int, int]:
    """Return the first byte of a column in a row group, and the byte after its last."""
    for number in range(group.num_columns):
        column = group.column(number)
        if column.path_in_schema == leaf:
            begin = min(filter(None, (column.data_page_offset, column.dictionary_page_offset)))
            return begin, begin + column.total_compressed_size
    raise AssertionError(leaf)


def _fields(path: str, message: str, found: list[str]) -> UsageError:
    return UsageError(message, code="data.shard_fields", path=path, found=list(found))


def _compressed(path: str, leaf: str) -> UsageError:
    return UsageError(
        f"{path} stores column {leaf!r} with compression, so that no image can be read alone. Write the file again "
        "without: pyarrow.parquet.write_table(pyarrow.parquet.read_table(PATH), NEW, compression='none')",
        code="data.shard_compressed",
        path=path,
        column=leaf,
    )
