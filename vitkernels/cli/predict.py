"""`vitkernels predict`: the most likely classes of image files, with their confidence.

    vitkernels predict runs/pets cat.jpg holiday/
    vitkernels predict runs/pets holiday/ --format csv --out labels.csv --sheet labels.png

Folders are searched with their subfolders. Unreadable files are listed and counted; the exit status is 1 if no file
could be read.
"""

import argparse
import io
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from vitkernels.cli.model_options import add_model_options, on_device, report
from vitkernels.files import write_atomically
from vitkernels.inference.contact_sheet import MOST, contact_sheet
from vitkernels.inference.images import as_input, find_images
from vitkernels.inference.run_model import ModelOnFiles, Prediction
from vitkernels.inference.tables import write_csv_rows, write_json_rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="vitkernels predict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_options(parser)
    parser.add_argument("--top", type=int, default=3, help="number of classes to print for each image")
    parser.add_argument("--format", choices=("table", "json", "csv"), default="table")
    parser.add_argument("--out", type=Path, help="file to write instead of the terminal")
    parser.add_argument("--sheet", type=Path, help=f"contact sheet to write, a PNG of up to {MOST} images")
    options = parser.parse_args(arguments)
    if options.top < 1:
        parser.error(f"--top must be at least 1; got {options.top}")
    model = on_device(options)
    top = min(options.top, len(model.trained.class_names))
    sheet: list[Prediction] = []
    predictions = _kept(model.predict(find_images(options.images), top), sheet, MOST if options.sheet else 0)
    counted = _Counted(predictions)
    if options.out is None:
        _write(options.format, counted, model, top, sys.stdout)
    else:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(options.out, lambda file: _write_encoded(options.format, counted, model, top, file))
        print(f"{counted.count} predictions in {options.out}", file=sys.stderr)
    if options.sheet:
        _draw(sheet, counted.count, model, options.sheet)
    return report(counted.count, model)


class _Counted:
    """Iterate over predictions and count them."""

    def __init__(self, predictions: Iterable[Prediction]):
        self.predictions, self.count = predictions, 0

    def __iter__(self) -> Iterator[Prediction]:
        for each in self.predictions:
            self.count += 1
            yield each


def _kept(predictions: Iterator[Prediction], first: list[Prediction], most: int) -> Iterator[Prediction]:
    """Pass the predictions on, and append the first ones to a list."""
    for each in predictions:
        if len(first) < most:
            first.append(each)
        yield each


def _write_encoded(kind: str, predictions: Iterable[Prediction], model: ModelOnFiles, top: int, file: BinaryIO) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    _write(kind, predictions, model, top, text)
    text.detach()  # flushes, and leaves the file open


def _write(kind: str, predictions: Iterable[Prediction], model: ModelOnFiles, top: int, file: TextIO) -> None:
    if kind == "json":
        write_json_rows(predictions, model.unreadable, file)
    elif kind == "csv":
        write_csv_rows(predictions, model.unreadable, file, top)
    else:
        _write_table(predictions, top, file)


def _write_table(predictions: Iterable[Prediction], top: int, file: TextIO) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("file", *("class" if rank == 0 else f"{rank + 1}." for rank in range(top)))
    table.columns[0].overflow = "fold"
    for each in predictions:
        table.add_row(each.file, *(f"{name}  {100 * share:.1f} %" for name, share in each.classes))
    # A file or a pipe has no width: names must not be cut off there.
    Console(file=file, width=None if file.isatty() else 160, highlight=False, markup=False).print(table)


def _draw(predictions: list[Prediction], count: int, model: ModelOnFiles, path: Path) -> None:
    channels = model.trained.input_size[0]
    tiles = []
    for each in predictions:
        name, share = each.classes[0]
        tiles.append((as_input(each.file, channels), (f"{name}  {100 * share:.1f} %", Path(each.file).name)))
    if not tiles:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(tiles, path)
    more = f", the first {len(tiles)} of {count} images" if count > len(tiles) else ""
    print(f"contact sheet: {path}{more}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
