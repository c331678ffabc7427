"""List the image files of class folders; symbolic links cannot move images between classes."""

import logging
import os
from collections import Counter
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

HIDDEN = "."  # prefix of the folders of tools, such as .ipynb_checkpoints, which are not classes
_MACOS = "._"  # prefix of the files in which macOS stores metadata of the file with the rest of the name


def list_classes(root: Path, classes: list[str]) -> dict[str, list[str]]:
    """Return class -> paths of its image files, sorted by folder and then by name.

    Images end in torchvision's IMG_EXTENSIONS and do not start with "._". Hidden folders are skipped. Linked folders
    outside of `root` are followed once; a link back into its own class is skipped. All of these are logged, as is the
    number of other files. UsageError for a link from one class to another or to a parent folder, and for a folder that
    cannot be listed.
    """
    other: Counter[str] = Counter()
    hidden: list[str] = []
    real = {name: os.path.realpath(root / name) for name in classes}
    files = {}
    for name in classes:
        forbidden = [os.path.realpath(root), *(path for each, path in real.items() if each != name)]
        if any(real[name] == path for path in forbidden) or _holds(real[name], forbidden[0]):
            raise _leaves_class(root / name, real[name], name)
        files[name] = _walk(root / name, name, forbidden, other, hidden)
    log_hidden(root, hidden)
    if other:
        counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in other.most_common(10))
        log.info("%s: ignored %d files that are not images: %s", root, other.total(), counts)
    return files


def log_hidden(root: Path, folders: list[str]) -> None:
    """Log which hidden folders were skipped."""
    if folders:
        more = f" and {len(folders) - 5} more" if len(folders) > 5 else ""
        log.info("%s: skipped hidden folders: %s%s", root, ", ".join(sorted(folders)[:5]), more)


def _walk(top: Path, name: str, forbidden: list[str], other: Counter[str], hidden: list[str]) -> list[str]:
    """Return the image files under a class folder; count the others by suffix, and collect hidden folders."""
    found, waiting, visited = [], [str(top)], {os.path.realpath(top)}
    while waiting:
        folder = waiting.pop()
        images = []
        for entry in _entries(folder):
            if entry.is_dir() and entry.name.startswith(HIDDEN):
                hidden.append(os.path.relpath(entry.path, top.parent))
            elif entry.is_dir():
                if _follow(entry, str(top), name, forbidden, visited):
                    waiting.append(entry.path)
            elif _is_image(entry):
                images.append(entry.name)
            else:
                other[_kind(entry)] += 1
        found.append((folder, sorted(images)))
    return [os.path.join(folder, image) for folder, images in sorted(found) for image in images]


def _entries(folder: str) -> list[os.DirEntry]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except OSError as error:
        raise cannot_list(folder, error) from error


def _is_image(entry: os.DirEntry) -> bool:
    """Return whether a file counts as an image: by its suffix, if it is a file or a link, which may be broken."""
    has_suffix = entry.name.lower().endswith(IMG_EXTENSIONS) and not entry.name.startswith(_MACOS)
    return has_suffix and (entry.is_file() or entry.is_symlink())  # reading a pipe would never end


def _kind(entry: os.DirEntry) -> str:
    """Return the kind under which the log counts a file that is not an image."""
    if entry.name.startswith(_MACOS):
        return f"{_MACOS}* (macOS writes them next to files)"
    suffix = os.path.splitext(entry.name)[1].lower()
    return f"{suffix} (not a regular file)" if suffix in IMG_EXTENSIONS else suffix


def _follow(entry: os.DirEntry, top: str, name: str, forbidden: list[str], visited: set[str]) -> bool:
    """Return whether to list this folder, and log why a linked one is listed or skipped."""
    target = os.path.realpath(entry.path)
    if entry.is_symlink():
        root, *classes = forbidden
        own = os.path.realpath(top)
        if (_holds(target, own) and target != own) or _holds(target, root) or any(_holds(c, target) for c in classes):
            raise _leaves_class(entry.path, target, name)
        if target in visited or _holds(own, target):
            log.warning("%s links to %s, a folder of the same class: skipped", entry.path, target)
            return False
        log.warning("%s links to %s: its images count for class %r", entry.path, target, name)
    elif target in visited:
        return False
    visited.add(target)
    return True


def _holds(folder: str, path: str) -> bool:
    """Return whether `path` is the folder or below it; both are real paths."""
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _leaves_class(link: Path | str, target: str, name: str) -> UsageError:
    return UsageError(
        f"{link} links to {target}, so that images of other classes would count for {name!r}: remove the link",
        code="data.links",
        path=str(link),
        target=target,
        class_name=name,
    )


def cannot_list(folder: str, error: OSError) -> UsageError:
    """Return the error for a folder that cannot be listed."""
    message = f"{folder} cannot be listed ({error.strerror}): get permission to read it, or remove it"
    return UsageError(message, code="data.folder", path=folder)
