"""Verify a data set of images: every shard, checksum and image."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vitkernels.data.decode import choose_decoder, why_unreadable
from vitkernels.data.folder import Folder
from vitkernels.data.shard_files.contract import Fields, ShardFile, ShardSamples
from vitkernels.data.shard_files.read import index_shard
from vitkernels.data.shard_files.write import RECORD
from vitkernels.data.workers import process_context
from vitkernels.errors import UsageError
from vitkernels.files import read_json

log = logging.getLogger(__name__)

_IMAGES = 500  # images of a folder that a process checks at a time
_LOG_EVERY = 20.0  # seconds


@dataclass
class Findings:
    """The result of a check.

    targets: of the images. problems: files that need repair, one line each. warnings: from decoding images.
    """

    targets: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def check_shards(files: Sequence[ShardFile], root: Path, fields: Fields, workers: int) -> Findings:
    """Read every byte of these shards: index them, compare checksums with root/shards.json, decode the images."""
    recorded = (read_json(root / RECORD) or {}).get("shards", {})
    findings = _collect(partial(_check_shard, fields=fields, recorded=recorded), files, workers, "shards")
    splits = {file.name.rpartition("-")[0] for file in files}
    missing = [name for name in sorted(recorded) if name.rpartition("-")[0] in splits and not (root / name).exists()]
    findings.problems += [f"{root / name} is missing, but {RECORD} lists it" for name in missing]
    return findings


def check_folder(folder: Folder, workers: int) -> Findings:
    """Decode every image of a folder's split."""
    count = len(folder.targets)
    parts = [range(first, min(first + _IMAGES, count)) for first in range(0, count, _IMAGES)]
    return _collect(partial(_check_files, folder), parts, workers, f"groups of {_IMAGES} images")


def _collect(check: Callable[[Any], Findings], items: Sequence, workers: int, kind: str) -> Findings:
    """Run the check of each item, in processes if `workers` is above 0, and join the findings."""
    found, last = [], time.monotonic()
    pool = ProcessPoolExecutor(workers, process_context()) if workers else nullcontext()
    with pool as executor:
        results = executor.map(check, items) if isinstance(executor, Executor) else map(check, items)
        for each in results:
            found.append(each)
            if time.monotonic() - last > _LOG_EVERY:
                last = time.monotonic()
                log.info("checked %d of %d %s", len(found), len(items), kind)
    return Findings(
        np.concatenate([each.targets for each in found]),
        [line for each in found for line in each.problems],
        [line for each in found for line in each.warnings],
    )


def _check_shard(file: ShardFile, fields: Fields, recorded: dict[str, dict]) -> Findings:
    findings = Findings()
    try:
        samples = index_shard(file, fields)
        findings.targets = samples.targets
        _check_content(file, samples, recorded, findings)
    except UsageError as error:
        findings.problems.append(str(error))
    except OSError as error:
        findings.problems.append(f"{file.location} cannot be read: {error}")
    return findings


def _check_content(file: ShardFile, samples: ShardSamples, recorded: dict[str, dict], findings: Findings) -> None:
    with open(file.location, "rb") as stream:
        if file.name in recorded and hashlib.file_digest(stream, "sha256").hexdigest() != recorded[file.name]["sha256"]:
            findings.problems.append(f"{file.location} has changed: its checksum is not the one in {RECORD}")

        def images() -> Iterator[tuple[str, bytes]]:
            for name, offset, length in zip(samples.names, samples.offsets, samples.lengths, strict=True):
                stream.seek(offset)
                yield f"{file.location}: {name}", stream.read(length)

        _decode(images(), findings)


def _check_files(folder: Folder, ids: range) -> Findings:
    findings = Findings(folder.targets[ids.start : ids.stop])

    def images() -> Iterator[tuple[str, bytes]]:
        for index in ids:
            try:
                yield folder.describe(index), folder.read(index)
            except OSError as error:
                findings.problems.append(f"{folder.describe(index)} cannot be read: {error}")

    _decode(images(), findings)
    return findings


def _decode(images: Iterator[tuple[str, bytes]], findings: Findings) -> None:
    decoder = choose_decoder("pillow")
    for name, data in images:
        try:
            image = decoder.open(data)
            decoder.decode(image)
        except Exception as error:  # a broken file can make a decoder raise almost anything
            findings.problems.append(f"{name} cannot be decoded ({why_unreadable(error)})")
            continue
        findings.warnings += [f"{name}: {warning}" for warning in image.warnings]
