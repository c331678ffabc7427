"""Write an image folder as tar shards in WebDataset's layout.

The images, the seed and the shard size determine every byte of a shard, so an interrupted run continues where it
stopped.
"""

import hashlib
import io
import json
import logging
import os
import re
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vitkernels.data.folder import Folder
from vitkernels.data.randomness import Stream, generator
from vitkernels.data.shard_files.contract import Fields, ShardFile
from vitkernels.data.shard_files.index import write_index
from vitkernels.data.shard_files.listing import published_index
from vitkernels.data.shard_files.read import CLASS_NAMES
from vitkernels.data.shard_files.tar import index_tar
from vitkernels.errors import UsageError
from vitkernels.files import read_json, write_atomically, write_json

log = logging.getLogger(__name__)

RECORD = "shards.json"  # in the output folder: the shards written so far, with checksums
_THREADS = 8  # threads that read images, because network file systems have a high latency
_LOG_EVERY = 20.0  # seconds


def write_shards(folders: dict[str, Folder], out: Path, *, shard_bytes: int, seed: int) -> dict[str, int]:
    """Write the images of each split in random order, and return the number of shards of each split.

    The output folder gets SPLIT-00000.tar, …, an index per split, class_names.json and shards.json. Shards that
    an earlier run with the same arguments completed are kept.

    Args:
        shard_bytes: size of a shard's images; a shard holds at least one image.
        seed: of the order. A random order lets every shard hold a random selection of the classes.

    Raises:
        UsageError: data.shard_out for a folder that holds something else; data.shard_source for an image that changed.
    """
    plans = {split: _plan(folder, shard_bytes, seed) for split, folder in folders.items()}
    digest = _digest(folders, plans, seed)
    record = _begin(out, digest)
    write_json(out / CLASS_NAMES, next(iter(folders.values())).classes)
    total = sum(len(plan) for plan in plans.values())
    done, last = 0, time.monotonic()
    for split, plan in plans.items():
        folder, keys = folders[split], _keys(folders[split])
        files = []
        for number, ids in enumerate(plan):
            name = f"{split}-{number:05d}.tar"
            known = record["shards"].get(name)
            if known is None or not (out / name).exists() or (out / name).stat().st_size != known["size"]:
                write_atomically(out / name, partial(_write_shard, folder=folder, ids=ids, keys=keys))
                with open(out / name, "rb") as file:
                    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
                record["shards"][name] = {"size": (out / name).stat().st_size, "sha256": sha256}
                write_json(out / RECORD, record)
            done += 1
            if time.monotonic() - last > _LOG_EVERY:
                last = time.monotonic()
                log.info("%d of %d shards", done, total)
            files.append(ShardFile(name, "", **record["shards"][name]))
        write_index(out / published_index(split), files, [index_tar(str(out / file.name), Fields()) for file in files])
    write_json(out / RECORD, {**record, "complete": True})
    return {split: len(plan) for split, plan in plans.items()}


def _plan(folder: Folder, shard_bytes: int, seed: int) -> list[np.ndarray]:
    """Return the images of each shard."""
    order = generator(seed, Stream.ORDER).permutation(len(folder.targets))
    shards: list[list[int]] = []
    filled = shard_bytes
    for index in order.tolist():
        size = os.stat(folder.describe(index)).st_size
        if filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(index)
        filled += size
    return [np.array(ids) for ids in shards]


def _digest(folders: dict[str, Folder], plans: dict[str, list[np.ndarray]], seed: int) -> str:
    """Return a digest of all that determines the shards' bytes; of images: name, size and modification time."""
    digest = hashlib.sha256(json.dumps([seed, {split: folder.classes for split, folder in folders.items()}]).encode())
    for split, folder in folders.items():
        digest.update(json.dumps([split, [len(ids) for ids in plans[split]]]).encode())
        for index, target in enumerate(folder.targets.tolist()):
            stat = os.stat(folder.describe(index))
            digest.update(f"\n{stat.st_size} {stat.st_mtime_ns} {target} ".encode() + bytes(folder.images[index]))
    return digest.hexdigest()


def _begin(out: Path, digest: str) -> dict[str, Any]:
    """Return the record of an earlier run with the same plan, or a new one."""
    out.mkdir(parents=True, exist_ok=True)
    record = read_json(out / RECORD)
    others = sorted(path.name for path in out.iterdir() if path.name != f"{RECORD}.tmp")
    if record is None and others:
        raise UsageError(
            f"{out} is not empty (it holds {', '.join(others[:5])}): choose a new folder",
            code="data.shard_out",
            out=str(out),
            found=others,
        )
    if record is not None and record.get("plan") != digest:
        raise UsageError(
            f"{out} holds shards of other images, or of the same with another seed or shard size: choose a new folder, "
            "or remove this one",
            code="data.shard_out",
            out=str(out),
            found=others,
        )
    if record is None:
        record = {"plan": digest, "complete": False, "shards": {}}
        write_json(out / RECORD, record)
    elif record["shards"]:
        log.info("%s: continuing after %d complete shards", out, len(record["shards"]))
    return record


def _keys(folder: Folder) -> list[str]:
    """Return the key of each image: its path without suffix and dots, and a number if two would be equal."""
    keys, seen = [], set()
    for image in folder.images:
        stem = os.path.splitext(os.fsdecode(image))[0]
        key = plain = re.sub(r"\.", "_", stem)
        number = 1
        while key in seen:
            number += 1
            key = f"{plain}-{number}"
        seen.add(key)
        keys.append(key)
    return keys


def _write_shard(file: BinaryIO, *, folder: Folder, ids: np.ndarray, keys: list[str]) -> None:
    with tarfile.open(fileobj=file, mode="w") as archive, ThreadPoolExecutor(_THREADS) as threads:
        for index, content in zip(ids.tolist(), threads.map(partial(_read, folder), ids.tolist()), strict=True):
            suffix = os.path.splitext(os.fsdecode(folder.images[index]))[1].lower()
            _add(archive, f"{keys[index]}{suffix}", content)
            _add(archive, f"{keys[index]}.cls", str(folder.targets[index]).encode())


def _read(folder: Folder, index: int) -> bytes:
    try:
        return folder.read(index)
    except OSError as error:
        path = folder.describe(index)
        message = f"{path} can no longer be read ({error}): run the command again when nothing changes the folder"
        raise UsageError(message, code="data.shard_source", path=path) from error


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    archive.addfile(member, io.BytesIO(content))
