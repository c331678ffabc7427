"""List the image files of class folders; symbolic links cannot move images between classes."""

import logging
import os
from collections import Counter
from pathlib import Path

from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkernels.errors import UsageError

log = logging.getLogger(__name__)


def list_classes(root: Path, classes: list[str]) -> dict[str, list[str]]:
    """Return class -> paths of its image files, sorted by folder and then by name.

    Linked folders outside of `root` are followed once; a link back into its own class is skipped. Both are logged, as
    is the number of files with other suffixes. UsageError for a link from one class to another or to a parent folder.
    """
    other: Counter[str] = Counter()
    real = {name: os.path.realpath(root / name) for name in classes}
    files = {}
    for name in classes:
        forbidden = [os.path.realpath(root), *(path for each, path in real.items() if each != name)]
        if any(real[name] == path for path in forbidden) or _holds(real[name], forbidden[0]):
            raise _leaves_class(root / name, real[name], name)
        files[name] = _walk(root / name, name, forbidden, other)
    if other:
        counts = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in other.most_common(10))
        log.info("%s: ignored %d files without an image suffix: %s", root, other.total(), counts)
    return files


def _walk(top: Path, name: str, forbidden: list[str], other: Counter[str]) -> list[str]:
    """Return the image files under a class folder, and count the others by suffix."""
    found, waiting, visited = [], [str(top)], {os.path.realpath(top)}
    while waiting:
        folder = waiting.pop()
        images = []
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.is_dir():
                    if entry.name.lower().endswith(IMG_EXTENSIONS):
                        images.append(entry.name)
                    else:
                        other[os.path.splitext(entry.name)[1].lower()] += 1
                elif _follow(entry, str(top), name, forbidden, visited):
                    waiting.append(entry.path)
        found.append((folder, sorted(images)))
    return [os.path.join(folder, image) for folder, images in sorted(found) for image in images]


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
