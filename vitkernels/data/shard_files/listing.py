"""Find the shards of each split below a folder."""

import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

from vitkernels.data.shard_files.contract import ShardFile
from vitkernels.data.shard_files.fetch import DEFAULT, Patience, ended, filesystem, is_url, patiently
from vitkernels.errors import UsageError

SUFFIXES = (".tar", ".parquet")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")
# Names of the property that changes with a file: on S3, Google Cloud Storage, Hugging Face, HTTP, others.
_VERSIONS = ("ETag", "etag", "generation", "blob_id", "md5Hash", "LastModified", "last_modified", "mtime")
_REQUESTS = 16  # concurrent requests
_WILDCARDS = set("*?[")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_LAYOUT = "such as ROOT/train-00000.tar and ROOT/val-00000.tar, or .parquet"


def list_shards(root: str | None, patterns: dict[str, str], patience: Patience = DEFAULT) -> dict[str, list[ShardFile]]:
    """Return the shards of each split, sorted by name.

    patterns: split -> a pattern of names relative to the root, such as "*train*", with ranges {00..31} of numbers.
    patience: with a root that is a URL.
    UsageError for a root that does not exist or may not be read, a split without shards, and a shard in two splits.
    SourceError for a URL that cannot be listed for as long as `patience` lasts.
    """
    files = remote_files(str(root), patterns, patience) if is_url(root) else list(_local_files(root))
    compressed = [file.name for file in files if file.name.lower().endswith(_COMPRESSED)]
    shards = [file for file in files if file.name.lower().endswith(SUFFIXES)]
    found = {split: _matching(shards, split, pattern, str(root)) for split, pattern in patterns.items()}
    for split, own in found.items():
        if not own:
            names = [file.name for file in files][:10]
            hint = " (compressed tar files cannot be read in any order: unpack them)" if compressed else ""
            raise UsageError(
                f"root={root} has no shards that match {split}={patterns[split]}{hint}; it holds "
                f"{', '.join(names) or 'no files'}. Expected {_LAYOUT}",
                code="data.shards",
                root=str(root),
                split=split,
                pattern=patterns[split],
                found=names,
            )
    both = sorted(set.intersection(*({file.name for file in own} for own in found.values()))) if len(found) > 1 else []
    if both:
        given = ", ".join(f"{split}={pattern}" for split, pattern in patterns.items())
        raise UsageError(
            f"{both[0]} matches the patterns of two splits, {given}: use patterns that match different files",
            code="data.shard_splits",
            root=str(root),
            found=both,
        )
    return found


def expand_ranges(pattern: str) -> list[str]:
    """Return the names in a pattern such as "train-{000..127}.tar"; numbers have the width of the first one."""
    parts = _RANGE.split(pattern)
    texts, firsts, lasts = parts[::3], parts[1::3], parts[2::3]
    ranges = [
        [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
        for first, last in zip(firsts, lasts, strict=True)
    ]
    return [
        "".join([texts[0], *(n + t for n, t in zip(chosen, texts[1:], strict=True))]) for chosen in product(*ranges)
    ]


def _matching(files: list[ShardFile], split: str, pattern: str, root: str) -> list[ShardFile]:
    names = expand_ranges(pattern)
    missing = [name for name in names if not any(fnmatchcase(file.name, name) for file in files)]
    if len(names) > 1 and missing:
        raise UsageError(
            f"root={root} lacks {len(missing)} of the {len(names)} shards of {split}={pattern}, such as {missing[0]}",
            code="data.shards",
            root=root,
            split=split,
            pattern=pattern,
            found=missing,
        )
    wanted = set(names)
    return [file for file in files if file.name in wanted or any(fnmatchcase(file.name, name) for name in names)]


def has_shards(root: Path) -> bool:
    """Return whether a folder, or a folder in it, holds a shard."""
    return any(file.name.lower().endswith(SUFFIXES) for file in _walk(root))


def published_index(split: str) -> str:
    """Return the file name of a published index, which is stored next to the shards for readers on other machines."""
    return f"{split}-index.safetensors"


def remote_files(url: str, patterns: dict[str, str], patience: Patience) -> list[ShardFile]:
    """Return the files below a URL, sorted by name. Patterns that name each file need no listing."""
    fs, base = filesystem(url)
    base = base.rstrip("/")
    if any(set(pattern) & _WILDCARDS for pattern in patterns.values()):
        infos = {info["name"].removeprefix(f"{base}/"): info for info in _listed(fs, base, url, patience)}
    else:
        infos = {name: {} for pattern in patterns.values() for name in expand_ranges(pattern)}
    infos = {name: info for name, info in infos.items() if name.lower().endswith((*SUFFIXES, *_COMPRESSED))}

    def location(name: str) -> str:
        return f"{url.rstrip('/')}/{name}"

    def described(name: str) -> ShardFile:
        info = infos[name]
        if info.get("size") is None:  # HTTP listings contain only names
            what = f"requesting the size of {location(name)}"
            info = patiently(what, location(name), lambda: fs.info(f"{base}/{name}"), patience)
        if info.get("size") is None:
            raise ended(location(name), "the server does not report its size")
        version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
        return ShardFile(name, location(name), int(info["size"]), version)

    with ThreadPoolExecutor(_REQUESTS) as threads:
        return list(threads.map(described, sorted(infos)))


def _listed(fs: Any, folder: str, url: str, patience: Patience) -> Iterator[dict[str, Any]]:
    """Yield fsspec's description of every file below a folder.

    fsspec's own `find` counts a folder that it cannot list, such as after a broken connection, as empty.
    """
    for info in patiently(f"listing {url}", url, lambda: fs.ls(folder, detail=True), patience):
        name = info["name"].rstrip("/")
        if name == folder or name.endswith(("/.", "/..")):
            continue
        if info["type"] == "directory":
            yield from _listed(fs, name, f"{url.rstrip('/')}/{name.removeprefix(f'{folder}/')}", patience)
        else:
            yield info


def _local_files(root: str | None) -> Iterable[ShardFile]:
    if not root:
        raise UsageError(f"root is not set: set it to the folder of the shards, {_LAYOUT}", code="data.root", root=root)
    if not isinstance(root, str | os.PathLike):
        raise UsageError(f"root={root}: expected the path of a folder", code="data.root", root=root)
    path = Path(root).expanduser().absolute()
    if not path.is_dir():
        kind = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"root={path} {kind}: set it to the folder of the shards", code="data.root", root=str(path))
    return sorted(_walk(path), key=lambda file: file.name)


def _walk(root: Path) -> Iterator[ShardFile]:
    for folder, _, names in os.walk(root):
        for name in names:
            if not name.lower().endswith((*SUFFIXES, *_COMPRESSED)):
                continue
            path = os.path.join(folder, name)
            stat = os.stat(path)
            yield ShardFile(os.path.relpath(path, root), path, stat.st_size, str(stat.st_mtime_ns))
