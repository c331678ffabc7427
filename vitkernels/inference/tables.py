"""Write predictions and features to files and terminals, as they come."""

import csv
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

import numpy as np
import torch

from vitkernels.errors import UsageError, unknown_name
from vitkernels.files import write_atomically
from vitkernels.inference.run_model import ModelOnFiles, Prediction


def write_json_rows(predictions: Iterable[Prediction], unreadable: dict[str, str], file: TextIO) -> None:
    """Write a JSON array with an object for each file; unreadable files follow, each with its error."""
    separator = "[\n"
    for each in predictions:
        classes = [{"class": name, "confidence": round(share, 6)} for name, share in each.classes]
        file.write(separator + json.dumps({"file": each.file, "predictions": classes}))
        separator = ",\n"
    for name, reason in unreadable.items():
        file.write(separator + json.dumps({"file": name, "error": reason}))
        separator = ",\n"
    file.write("\n]\n" if separator == ",\n" else "[]\n")


def write_csv_rows(predictions: Iterable[Prediction], unreadable: dict[str, str], file: TextIO, top: int) -> None:
    """Write a line for each file: file, class_1, confidence_1, ..., error."""
    writer = csv.writer(file)
    writer.writerow(["file", *(f"{name}_{i}" for i in range(1, top + 1) for name in ("class", "confidence")), "error"])
    for each in predictions:
        cells = [cell for name, share in each.classes for cell in (name, round(share, 6))]
        writer.writerow([each.file, *cells, ""])
    for name, reason in unreadable.items():
        writer.writerow([name, *[""] * (2 * top), reason])


def write_features(model: ModelOnFiles, files: Iterable[str], out: Path) -> tuple[int, int]:
    """Write the features of image files and their names; return the number of files and of features.

    .npz has `features` float32 (N, D) and `files` (N,), both in memory until the end. .parquet has the columns `file`
    and `features`, and is written batch by batch.

    Raises UsageError: "unknown_name" for another suffix, "embed.extra" if pyarrow is missing.
    """
    writers = {".npz": _write_npz, ".parquet": _write_parquet}
    if out.suffix not in writers:
        raise unknown_name("suffix of a features file", out.suffix, writers)
    out.parent.mkdir(parents=True, exist_ok=True)
    return writers[out.suffix](model.embed(files), out)


def _write_npz(batches: Iterator[tuple[list[str], torch.Tensor]], out: Path) -> tuple[int, int]:
    names: list[str] = []
    rows: list[np.ndarray] = []
    for files, features in batches:
        names += files
        rows.append(features.numpy())
    table = np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)
    write_atomically(out, lambda file: np.savez(file, features=table, files=np.array(names, dtype=np.str_)))
    return len(names), table.shape[1]


def _write_parquet(batches: Iterator[tuple[list[str], torch.Tensor]], out: Path) -> tuple[int, int]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        message = f"{out} needs pyarrow: pip install 'vitkernels[shards]', or write a .npz file"
        raise UsageError(message, code="embed.extra", path=str(out)) from error
    schema = pyarrow.schema([("file", pyarrow.string()), ("features", pyarrow.list_(pyarrow.float32()))])
    staged, count, width = out.with_name(out.name + ".tmp"), 0, 0
    try:
        with parquet.ParquetWriter(staged, schema) as writer:
            for files, features in batches:
                writer.write_table(pyarrow.table({"file": files, "features": features.tolist()}, schema=schema))
                count, width = count + len(files), features.shape[1]
        os.replace(staged, out)
    finally:
        staged.unlink(missing_ok=True)
    return count, width
