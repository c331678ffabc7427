"""Read a table of image paths and targets: several labels for an image, or a share of each class.

Shapes: N images, K classes.
"""

import csv
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitkernels.errors import UsageError

SUFFIXES = (".csv", ".json", ".jsonl", ".parquet")
SEPARATOR = ";"  # of labels in a CSV file
_SPLIT_NAMES = {"train": "train", "training": "train", "val": "val", "valid": "val", "validation": "val"}
_ROUNDING = 1e-3  # of a sum of shares, which tables round to a few digits


@dataclass(frozen=True)
class TargetTable:
    """The rows of a table, in its order.

    paths: of the images, relative or absolute. targets: float32 (N, K), 0 to 1. classes: names, or None.
    splits: "train" or "val" of each row, or None if the table does not say. are_shares: whether each row sums to 1 and
    none is a list of labels, so that the row is a distribution over classes.
    """

    paths: list[str]
    targets: np.ndarray
    classes: list[str] | None
    splits: list[str] | None
    are_shares: bool


def read_table(path: Path, num_classes: int | None) -> TargetTable:
    """Return the table in a CSV, JSON or Parquet file.

    The column `path` names the image, and `split` (optional) is train or val. The column `targets` holds a list of
    labels (names or class numbers; in CSV files separated by ;), a list of a number per class, or an object with a
    number per class name. Without it, every other column is a class with a number per image. A list of integers holds
    a number per class if another number in any list of the table has a fraction, as 0.5 or 1.0.

    Args:
        num_classes: number of classes of a table of class numbers; None takes the largest + 1.

    Raises:
        UsageError: data.table for a file that cannot be read or an invalid target, with `row` and `value`.
    """
    rows = _rows(path)
    if not rows or "path" not in rows[0]:
        raise _error(
            path, f"expected a column 'path' and at least one row; found {', '.join(rows[0]) if rows else '-'}"
        )
    wide = "targets" not in rows[0]
    names = [name for name in rows[0] if name not in ("path", "split")] if wide else []
    if wide and not names:
        raise _error(path, "expected a column 'targets', or one column per class")
    _check_columns(path, rows, wide)
    entries = [{name: row.get(name) for name in names} if wide else row["targets"] for row in rows]
    entries = _numbers_per_class(entries)
    _check_lengths(path, entries)
    values = [_entry(path, number, entry) for number, entry in enumerate(entries, 1)]
    if not wide:
        names = sorted({label for value in values for label in value if isinstance(label, str)})
    targets = _matrix(path, values, names, num_classes)
    listed = any(isinstance(entry, list | str) and not _is_vector(entry) for entry in entries)
    are_shares = not listed and bool((np.abs(targets.sum(1) - 1) < _ROUNDING).all())
    splits = _splits(path, rows) if "split" in rows[0] else None
    return TargetTable([str(row["path"]) for row in rows], targets, names or None, splits, are_shares)


def _rows(path: Path) -> list[dict[str, Any]]:
    if path.suffix.lower() not in SUFFIXES:
        raise _error(path, f"expected a file that ends in {', '.join(SUFFIXES)}")
    try:
        if path.suffix.lower() == ".csv":
            with open(path, newline="", encoding="utf-8-sig") as file:
                return _csv_rows(path, csv.DictReader(file))
        if path.suffix.lower() == ".parquet":
            return _parquet_rows(path)
        text = path.read_text(encoding="utf-8")
        rows = json.loads(text) if path.suffix.lower() == ".json" else list(map(json.loads, text.splitlines()))
    except UsageError:  # a ValueError
        raise
    except (OSError, ValueError, csv.Error) as error:
        raise _error(path, f"cannot be read ({error})") from error
    if not (isinstance(rows, list) and all(isinstance(row, dict) for row in rows)):
        raise _error(path, "expected a list of objects with path and targets")
    return rows


def _csv_rows(path: Path, reader: csv.DictReader) -> list[dict[str, Any]]:
    rows = list(reader)
    for number, row in enumerate(rows, 1):
        if None in row or None in row.values():  # as DictReader fills rows that are too long or too short
            message = f"row {number} has more or fewer values than the header; quote values that contain a comma"
            raise _error(path, message, row=number)
    return rows


def _parquet_rows(path: Path) -> list[dict[str, Any]]:
    try:
        import pyarrow.parquet
    except ImportError as error:
        message = f"{path}: Parquet files need pyarrow, which is not installed: pip install 'vitkernels[shards]'"
        raise UsageError(message, code="data.package", package="pyarrow") from error
    return pyarrow.parquet.read_table(path).to_pylist()


def _check_columns(path: Path, rows: list[dict[str, Any]], wide: bool) -> None:
    """Raise UsageError for a row without a column that each row needs, or with a class that the first row lacks."""
    for number, row in enumerate(rows, 1):
        missing = [name for name in (("path",) if wide else ("path", "targets")) if name not in row]
        extra = [name for name in row if wide and name not in rows[0]]
        if missing:
            raise _error(path, f"row {number} has no column {missing[0]!r}", row=number)
        if extra:
            message = f"row {number} has the column {extra[0]!r}, which the first row lacks"
            raise _error(path, message, row=number, value=extra[0])


def _numbers_per_class(entries: list[Any]) -> list[Any]:
    """Return the entries, with all lists of numbers as floats if any number is one, because programs write 1.0 as 1."""
    numbers = [isinstance(entry, list) and all(type(value) in (int, float) for value in entry) for entry in entries]
    if not any(is_list and float in map(type, entry) for is_list, entry in zip(numbers, entries, strict=True)):
        return entries
    return [list(map(float, e)) if is_list and e else e for is_list, e in zip(numbers, entries, strict=True)]


def _check_lengths(path: Path, entries: list[Any]) -> None:
    """Raise UsageError if fractions are given for different numbers of classes."""
    lengths = {len(entry): number for number, entry in reversed(list(enumerate(entries, 1))) if _is_vector(entry)}
    if len(lengths) > 1:
        (one, first), (other, second) = sorted(lengths.items(), key=lambda item: item[1])[:2]
        message = f"row {first} has fractions of {one} classes, row {second} of {other}"
        raise _error(path, message, row=second, value=other)


def _entry(path: Path, row: int, entry: Any) -> dict[str | int, float]:
    """Return class -> number of one row; a class is a name or a number."""
    found: dict[str | int, float]
    if isinstance(entry, Mapping):
        found = {str(name): _number(path, row, value) for name, value in entry.items() if value is not None}
    elif _is_vector(entry):
        found = {number: _number(path, row, value) for number, value in enumerate(entry)}
    elif isinstance(entry, str):
        labels = [label.strip() for label in entry.split(SEPARATOR) if label.strip()]
        found = {int(label) if label.isdecimal() else label: 1.0 for label in labels}
    elif isinstance(entry, list) and len(entry) > 2 and all(label in (0, 1) for label in entry):
        message = f"row {row} has the targets {entry!r}: write numbers per class as 1.0 and 0.0, or each label once"
        raise _error(path, message, row=row, value=entry)
    elif isinstance(entry, list) and all(isinstance(label, str | int) for label in entry):
        found = dict.fromkeys(entry, 1.0)
    else:
        raise _error(path, f"row {row} has the targets {entry!r}: expected labels or numbers", row=row, value=entry)
    if any(isinstance(label, int) and label < 0 for label in found):
        raise _error(path, f"row {row} has a negative class number: {entry!r}", row=row, value=entry)
    return found


def _is_vector(entry: Any) -> bool:
    return isinstance(entry, list) and bool(entry) and all(isinstance(value, float) for value in entry)


def _number(path: Path, row: int, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = -1.0
    if not 0 <= number <= 1:
        raise _error(path, f"row {row} has the target {value!r}: expected a number from 0 to 1", row=row, value=value)
    return number


def _matrix(path: Path, values: list[dict[str | int, float]], names: list[str], num_classes: int | None) -> np.ndarray:
    """Return the targets float32 (N, K)."""
    numbers = sorted({label for value in values for label in value if isinstance(label, int)})
    if names and numbers:
        raise _error(path, f"mixes class names such as {names[0]!r} and numbers such as {numbers[0]}", value=numbers[0])
    count = len(names) or max(num_classes or 0, numbers[-1] + 1 if numbers else 0)
    if count < 2 or (num_classes is not None and count != num_classes):
        raise UsageError(
            f"{path} has {count} classes, but num_classes={num_classes}; training needs at least two",
            code="data.num_classes",
            num_classes=num_classes,
            largest=count - 1,
        )
    place: dict[str | int, int] = {name: number for number, name in enumerate(names)}
    targets = np.zeros((len(values), count), dtype=np.float32)
    for row, value in enumerate(values):
        for label, number in value.items():
            targets[row, label if isinstance(label, int) else place[label]] = number
    return targets


def _splits(path: Path, rows: list[dict[str, Any]]) -> list[str]:
    found = []
    for number, row in enumerate(rows, 1):
        split = _SPLIT_NAMES.get(str(row.get("split")).strip().lower())
        if split is None:
            value = row.get("split")
            raise _error(path, f"row {number} has the split {value!r}: expected train or val", row=number, value=value)
        found.append(split)
    return found


def _error(path: Path, message: str, row: int | None = None, value: Any = None) -> UsageError:
    return UsageError(f"{path}: {message}", code="data.table", path=str(path), row=row, value=value)
