"""`vitkernels data`: write an image folder as shards, and check a data set.

    vitkernels data shard photos photo-shards --val-share 0.1
    vitkernels data check photo-shards

`shard` takes FOLDER/train/<class>/<image> and FOLDER/val/<class>/<image>, or, with --val-share, FOLDER/<class>/<image>.
Run an interrupted command again to continue it. `check` reads every byte of shards or of an image folder; its exit
status is 1 if a file needs repair.
"""

import argparse
import logging
import sys
from pathlib import Path

import numpy as np

from vitkernels.data.checks import check_number, usable_cores
from vitkernels.data.folder import scan_splits, split_by_name
from vitkernels.data.shard_files.check import Findings, check_folder, check_shards
from vitkernels.data.shard_files.contract import Fields
from vitkernels.data.shard_files.listing import has_shards, list_shards
from vitkernels.data.shard_files.open import PATTERNS
from vitkernels.data.shard_files.parquet import class_names as parquet_class_names
from vitkernels.data.shard_files.read import CLASS_NAMES, is_parquet, read_class_names
from vitkernels.data.shard_files.write import write_shards
from vitkernels.files import is_disk_error

_LISTED = 20  # lines to print of each kind


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="vitkernels data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    shard = commands.add_parser("shard", help="write an image folder as tar shards in WebDataset's layout")
    shard.add_argument("folder", type=Path, metavar="FOLDER", help="folder with train/ and val/, or with class folders")
    shard.add_argument("out", type=Path, metavar="OUT", help="new folder, or that of an interrupted run")
    shard.add_argument("--val-share", type=float, help="share of each class for evaluation, if there is no val/")
    shard.add_argument("--shard-mb", type=float, default=256, help="size of a shard in MB (10^6 bytes)")
    shard.add_argument("--seed", type=int, default=0, help="seed of the shuffle")
    shard.set_defaults(run=_shard)
    check = commands.add_parser("check", help="read every byte of a data set, and list the files that need repair")
    check.add_argument("root", type=Path, metavar="ROOT", help="folder of shards, or an image folder")
    check.add_argument("--train-shards", default=PATTERNS["train"], help="file name pattern of the training shards")
    check.add_argument("--val-shards", default=PATTERNS["val"], help="file name pattern of the evaluation shards")
    check.add_argument("--image", help="suffix or column of the images, as data.image")
    check.add_argument("--label", help="suffix or column of the labels, as data.label")
    check.add_argument("--workers", type=int, default=usable_cores(), help="worker processes; 0 reads in this process")
    check.set_defaults(run=_check)
    options = parser.parse_args(arguments)
    log = logging.getLogger("vitkernels.data")
    before = log.level
    log.setLevel(logging.INFO)  # both commands can take hours
    try:
        return options.run(options)
    finally:
        log.setLevel(before)


def _shard(options: argparse.Namespace) -> int:
    check_number("--shard-mb", options.shard_mb, 0.001)
    check_number("--seed", options.seed, 0, integer=True)
    splits = ["train", "val"]
    if options.val_share is None:
        folders = scan_splits(str(options.folder), splits)
    else:
        check_number("--val-share", options.val_share, 0.001, 0.999)
        folders = split_by_name(str(options.folder), splits, options.val_share)
    try:
        written = write_shards(folders, options.out, shard_bytes=int(options.shard_mb * 1e6), seed=options.seed)
    except OSError as error:
        if not is_disk_error(error) and not isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
            raise
        message = f"error: could not write to {options.out}: {error}; run the same command again to continue"
        print(message, file=sys.stderr)
        return 2
    for split, count in written.items():
        images = _counted(len(folders[split].targets), "image")
        print(f"{split}: {images} of {len(folders[split].classes)} classes in {_counted(count, 'shard')}")
    print(f"to train on the shards: vitkernels train data=shards data.root={options.out}")
    return 0


def _check(options: argparse.Namespace) -> int:
    check_number("--workers", options.workers, 0, integer=True)
    if not has_shards(options.root):
        folders = scan_splits(str(options.root), ["train", "val"])
        found = {split: check_folder(folder, options.workers) for split, folder in folders.items()}
        return _report(found, {}, folders["train"].classes)
    patterns = {"train": options.train_shards, "val": options.val_shards}
    files = list_shards(str(options.root), patterns)
    fields = Fields(options.image, options.label)
    names = read_class_names(options.root / CLASS_NAMES)
    if names is None and is_parquet(files["val"][0]):
        names = parquet_class_names(files["val"][0].location, fields)
    fields = Fields(options.image, options.label, None if names is None else tuple(names))
    found = {split: check_shards(own, options.root, fields, options.workers) for split, own in files.items()}
    return _report(found, {split: len(own) for split, own in files.items()}, names)


def _report(found: dict[str, Findings], shards: dict[str, int], names: list[str] | None) -> int:
    """Print what was found; return the exit status."""
    largest = max((int(each.targets.max()) + 1 for each in found.values() if len(each.targets)), default=0)
    classes = len(names) if names else largest
    for split, each in found.items():
        where = f" in {_counted(shards[split], 'shard')}" if split in shards else ""
        counts = np.bincount(each.targets, minlength=classes)
        spread = f", {counts.min()} to {counts.max()} images each" if classes else ""
        print(f"{split}: {_counted(len(each.targets), 'image')}{where}, {classes} classes{spread}")
        if classes < largest:
            each.problems.append(f"{split} has labels up to {largest - 1}, but there are {classes} class names")
        _print_some(each.warnings, "decoded with a warning")
        _print_some(each.problems, "to repair")
    count = sum(len(each.problems) for each in found.values())
    print(f"{_counted(count, 'problem')} found" if count else "no problems found")
    return int(count > 0)


def _print_some(lines: list[str], kind: str) -> None:
    for line in lines[:_LISTED]:
        print(f"  {kind}: {line}")
    if len(lines) > _LISTED:
        print(f"  {kind}: {len(lines) - _LISTED} more")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


if __name__ == "__main__":
    sys.exit(main())
