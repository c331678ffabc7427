"""Images with several labels, or a share of each class: a table of paths and targets."""

import hashlib
import logging
import os
from pathlib import Path

import numpy as np

from vitkernels.data.checks import check_number
from vitkernels.data.contract import PRESENT, Data
from vitkernels.data.folder import Folder
from vitkernels.data.images import ImageSettings
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.target_table import TargetTable, read_table
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)


@data_set
def build(
    spec: InputSpec,
    images: ImageSettings,
    *,
    root: str | None = None,
    table: str | None = None,
    val_share: float | None = None,
    num_classes: int | None = None,
) -> Data:
    """Return images float32 (B, 3, image_size, image_size), and targets float32 (B, K) of a table.

    If every row of the table is a distribution over classes, the data set's `targets` are "distributions", and the
    evaluation's target is the most likely class; else they are "labels". conf/data/table.yaml explains the arguments.
    Raises UsageError, before any image is decoded, for a table that cannot be used and for images that do not exist.
    """
    check_number("num_classes", num_classes, 2, integer=True, null=True)
    if val_share is not None:
        check_number("val_share", val_share, 0.001, 0.999)

    def open_table() -> tuple[dict[str, Folder], int, list[str] | None]:
        if not table:
            message = f"table={table}: set it to a CSV, JSON or Parquet file with the columns path and targets"
            raise UsageError(message, code="data.table", path=table, row=None, value=None)
        path = Path(table).expanduser()
        found = read_table(path, num_classes)
        folder = Path(root).expanduser() if root else path.parent
        is_val = _is_val(found, path, val_share)
        chosen = {"train": ~is_val, "val": is_val} if spec.train else {"val": is_val}
        sources = {split: _source(found, folder, rows, split, path) for split, rows in chosen.items()}
        return sources, found.targets.shape[1], found.classes

    return images.build(spec, open_table, log)


def _is_val(table: TargetTable, path: Path, val_share: float | None) -> np.ndarray:
    """Return bool (N,), true for evaluation rows: by the column split, or by a hash of the path."""
    if (table.splits is None) == (val_share is None):
        has = "no column 'split'" if table.splits is None else "a column 'split'"
        raise UsageError(
            f"{path} has {has} and val_share={val_share}: use only one of them to choose the evaluation images",
            code="data.val_share",
            root=str(path),
            found=[],
        )
    if table.splits is not None:
        return np.array(table.splits) == "val"
    hashes = [int.from_bytes(hashlib.sha256(os.fsencode(name)).digest()[:6]) / 2**48 for name in table.paths]
    return np.array(hashes) < val_share


def _source(table: TargetTable, folder: Path, rows: np.ndarray, split: str, path: Path) -> Folder:
    (chosen,) = np.nonzero(rows)
    if not len(chosen):
        message = f"{path} has no images for {split}: correct the column split, or val_share"
        raise UsageError(message, code="data.table", path=str(path), row=None, value=split)
    names = [table.paths[row] for row in chosen]
    for row, name in zip(chosen, names, strict=True):
        if not (folder / name).is_file():
            message = f"{path}: row {row + 1} names {folder / name}, which does not exist: correct it, or set root"
            raise UsageError(message, code="data.table", path=str(path), row=int(row) + 1, value=name)
    targets = table.targets[chosen]
    if table.are_shares and split == "val":
        targets = targets.argmax(1).astype(np.int64)
    elif split == "val" and not (targets > PRESENT).any():
        message = f"{path} has no label for any evaluation image, so nothing can be evaluated"
        raise UsageError(message, code="data.table", path=str(path), row=None, value=split)
    encoded = np.array([os.fsencode(name) for name in names])
    return Folder(folder, table.classes or [], encoded, targets)
