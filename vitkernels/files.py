"""Write files so that a crash or a full disk leaves either the old content or the new one, never a torn file."""

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
_OF_THE_PLACE = (*_OF_THE_DISK, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.EEXIST)


def is_disk_error(error: BaseException) -> bool:
    """Return whether an error means that a disk is full, over its quota or read-only."""
    return isinstance(error, OSError) and error.errno in _OF_THE_DISK


def is_place_error(error: OSError) -> bool:
    """Return whether a file cannot be written where it was asked for, while another place may work."""
    return error.errno in _OF_THE_PLACE


def read_json(path: Path) -> dict | None:
    """Return the JSON object in a file, or None if the file is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None


def write_json(path: Path, content: Any) -> None:
    """Replace the file with `content` as indented JSON, atomically; missing parent folders are created."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))


def write_atomically(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write(file)` on a temporary file next to `path`, sync it to disk, and rename it to `path`."""
    temporary = path.with_name(path.name + ".tmp")
    write_synced(temporary, write)
    os.replace(temporary, path)
    sync_folder(path.parent)  # the rename itself must survive a power cut


def write_synced(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write(file)` on a new file and sync it to disk; remove the file if that fails.

    A partial file is removed at once because other writers need its space when the disk is full.
    """
    try:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with contextlib.suppress(OSError):  # of a read-only disk; the first error is the cause
            path.unlink(missing_ok=True)
        raise


def free_bytes(folder: Path) -> int:
    """Return the space that this user may still write to the disk of a folder, which need not exist yet."""
    place = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    disk = os.statvfs(place)
    return disk.f_bavail * disk.f_frsize


def sync_folder(path: Path) -> None:
    """Sync a folder's entries to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
