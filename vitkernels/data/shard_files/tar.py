"""Index a tar file in WebDataset's layout: members named KEY.FIELD, with the members of a sample adjacent.

The key is the member's name up to the first dot after its last slash, as in webdataset.tariterators.
"""

import json
import os
import re
import tarfile
from collections import Counter
from typing import BinaryIO

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkernels.data.shard_files.contract import Fields, ShardSamples, truncated, unreadable
from vitkernels.errors import UsageError

_MEMBER = re.compile(r"((?:.*/)?[^./][^/.]*)\.([^/]+)")
_IMAGES = {suffix.removeprefix(".") for suffix in IMG_EXTENSIONS}
BLOCK = 512  # bytes; an archive ends with two blocks of zeros


def index_tar(path: str, fields: Fields) -> ShardSamples:
    """Return the samples of a tar file; members that belong to no image are ignored.

    Raises:
        UsageError: data.shard_truncated, data.shard_unreadable, data.shard_fields for an image without a label and for
            a key in two places, data.shard_label.
    """
    with open(path, "rb") as file:
        members = _members(path, file)
        label, _, json_field = (fields.label or "cls").partition(".")
        if label != "json":
            label, json_field = fields.label or "cls", ""
        rows: list[tuple[int, int, int]] = []
        names = []
        for key, suffixes in _grouped(path, members):
            image = suffixes.get(fields.image.lower()) if fields.image else _image(suffixes)
            if image is None:
                continue
            where = f"{path}: {key}"
            if label not in suffixes:
                raise _no_label(where, label, suffixes)
            text = os.pread(file.fileno(), suffixes[label].size, suffixes[label].offset_data)
            target = fields.class_number(_json_value(text, json_field, where) if json_field else text, where)
            rows.append((image.offset_data, image.size, target))
            names.append(key)
    if not rows:
        kinds = Counter(name.rpartition(".")[2] for name in (member.name for member in members)).most_common(5)
        expected = fields.image or "an image format"
        raise UsageError(
            f"{path} holds no images: no member ends in {expected} (found: {', '.join(k for k, _ in kinds) or 'none'})",
            code="data.shard_fields",
            path=path,
            found=[kind for kind, _ in kinds],
        )
    offsets, lengths, targets = np.array(rows, dtype=np.int64).T
    return ShardSamples(offsets, lengths, targets, names)


def _members(path: str, file: BinaryIO) -> list[tarfile.TarInfo]:
    """Return the regular files of a complete archive; raise UsageError for any other file."""
    size = os.fstat(file.fileno()).st_size
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            members = [member for member in archive if member.isreg()]
            end = archive.offset
    except tarfile.ReadError as error:
        if "unexpected end" in str(error):
            raise truncated(path, f"its last member continues after byte {size}") from error
        raise unreadable(path, f"it is not a tar file without compression ({error})") from error
    block = os.pread(file.fileno(), BLOCK, end)  # tarfile stops silently at anything that is not a member
    if len(block) < BLOCK:
        raise truncated(path, f"it ends at byte {size} without the zeros that end a tar file")
    if any(block):
        raise unreadable(path, f"there is no tar member at byte {end}")
    return members


def _grouped(path: str, members: list[tarfile.TarInfo]) -> list[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Return (key, suffix -> member) of each sample, in order."""
    samples: dict[str, dict[str, tarfile.TarInfo]] = {}
    latest = None
    for member in members:
        found = _MEMBER.fullmatch(member.name)
        if found is None:
            continue
        key, suffix = found[1], found[2].lower()
        if (key != latest and key in samples) or suffix in samples.setdefault(key, {}):
            raise UsageError(
                f"{path} has two samples named {key!r}: the members of a sample must be adjacent, and its name "
                "must be unique in the file",
                code="data.shard_fields",
                path=path,
                found=[key],
            )
        samples[key][suffix] = member
        latest = key
    return list(samples.items())


def _image(suffixes: dict[str, tarfile.TarInfo]) -> tarfile.TarInfo | None:
    return next((member for suffix, member in suffixes.items() if suffix in _IMAGES), None)


def _json_value(text: bytes, field: str, where: str) -> object:
    try:
        return json.loads(text)[field]
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{where}.json has no field {field!r} ({type(error).__name__}): correct label",
            code="data.shard_fields",
            path=where,
            found=[],
        ) from error


def _no_label(where: str, label: str, suffixes: dict[str, tarfile.TarInfo]) -> UsageError:
    found = sorted(suffixes)
    return UsageError(
        f"{where} has no member {label!r} with its class (it has {', '.join(found)}): set label to the member that "
        "holds the class, such as label=cls or label=json.label",
        code="data.shard_fields",
        path=where,
        found=found,
    )
