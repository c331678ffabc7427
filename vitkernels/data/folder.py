"""List an image folder, and check its classes before training starts.

Layout: root/train/<class>/…/<image> and root/val/<class>/…/<image>.
"""

import hashlib
import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes

from vitkernels.data.class_files import HIDDEN, cannot_list, list_classes, log_hidden
from vitkernels.data.image_source import evenly_spaced
from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

LAYOUT = "expected ROOT/train/<class>/<image>.jpg and ROOT/val/<class>/<image>.jpg"


@dataclass(frozen=True)
class Folder:
    """The images of one split."""

    path: Path
    classes: list[str]
    images: np.ndarray  # bytes (N,), relative to path: one block of memory, cheap to pickle for workers
    targets: np.ndarray  # int64 (N,), or float32 (N, K) of a table

    @property
    def name(self) -> str:
        return str(self.path)

    def describe(self, index: int) -> str:
        """Return the path of an image."""
        return os.path.join(self.path, os.fsdecode(self.images[index]))

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Return the bytes of a file, or its first `limit` bytes."""
        with open(self.describe(index), "rb") as file:
            return file.read(-1 if limit is None else limit)

    def spread(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced images."""
        return evenly_spaced(len(self.targets), count).tolist()

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return a permutation of the images."""
        return draw.permutation(len(self.targets))


def scan_splits(root: str | None, splits: list[str]) -> dict[str, Folder]:
    """List the images of each split. UsageError if the folder cannot be trained or evaluated on."""
    path = _existing_folder(root)
    missing = [split for split in splits if not (path / split).is_dir()]
    if missing:
        found = sorted(entry.name for entry in path.iterdir())[:10]
        split_here = f"root={path / 'train'}" if missing == ["val"] else "ROOT/<class>/<image>.jpg"
        raise UsageError(
            f"root={path} has no {' and no '.join(f'{split}/ folder' for split in missing)} "
            f"(it contains: {', '.join(found) or 'nothing'}); {LAYOUT}, or {split_here} with val_share=0.1",
            code="data.splits",
            root=str(path),
            missing=missing,
            found=found,
        )
    folders = {split: _scan(path / split) for split in splits}
    if len(folders) == 2:
        _check_same_classes(*folders.values())
    return folders


def split_by_name(root: str | None, splits: list[str], val_share: float) -> dict[str, Folder]:
    """List ROOT/<class>/<image>, and assign about val_share of each class to "val" by a hash of the name.

    An image stays in its split as others are added, except in classes so small that all hashes fall on one side: the
    image nearest to the limit then changes sides, so that each class has an image in both splits. UsageError for a
    folder that already has splits, or has a class with one image.
    """
    path = _existing_folder(root)
    present = [split for split in ("train", "val") if (path / split).is_dir()]
    if present:
        raise UsageError(
            f"val_share={val_share}, but {path} has the folder {present[0]}/: "
            + ("use val_share=null" if len(present) == 2 else f"to split that folder, set root={path / present[0]}"),
            code="data.val_share",
            root=str(path),
            found=present,
        )
    everything = _scan(path)
    hashes = np.array([int.from_bytes(hashlib.sha256(bytes(name)).digest()[:6]) for name in everything.images]) / 2**48
    is_val = hashes < val_share
    for target, name in enumerate(everything.classes):
        (members,) = np.nonzero(everything.targets == target)
        if len(members) < 2:
            raise UsageError(
                f"{path}: class {name!r} has one image, but val_share needs two per class: add images or remove it",
                code="data.val_share",
                root=str(path),
                class_name=name,
            )
        if not is_val[members].any():
            is_val[members[hashes[members].argmin()]] = True
        elif is_val[members].all():
            is_val[members[hashes[members].argmax()]] = False
    chosen = {"train": ~is_val, "val": is_val}
    log.info("%s: %d training and %d evaluation images (val_share=%g)", path, (~is_val).sum(), is_val.sum(), val_share)
    return {
        split: Folder(path, everything.classes, everything.images[chosen[split]], everything.targets[chosen[split]])
        for split in splits
    }


def _existing_folder(root: str | None) -> Path:
    if not root:
        raise UsageError(f"root is not set: set it to the image folder; {LAYOUT}", code="data.root", root=root)
    if not isinstance(root, str | os.PathLike):
        raise UsageError(f"root={root}: expected the path of a folder; {LAYOUT}", code="data.root", root=root)
    path = Path(root).expanduser().absolute()
    if not path.is_dir():
        kind = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"root={path} {kind}: set it to the image folder; {LAYOUT}", code="data.root", root=str(path))
    return path


def _scan(path: Path) -> Folder:
    try:
        found, _ = find_classes(path)
    except PermissionError as error:
        raise cannot_list(str(path), error) from error
    except FileNotFoundError:
        found = []
    classes = [name for name in found if not name.startswith(HIDDEN)]
    log_hidden(path, [name for name in found if name.startswith(HIDDEN)])
    if not classes:
        raise UsageError(
            f"{path} has no class folders: move each image into a folder named after its class",
            code="data.no_classes",
            path=str(path),
        )
    if len(classes) == 1:
        raise UsageError(
            f"{path} has only one class folder, {classes[0]!r}, and training needs at least two: add the other classes",
            code="data.one_class",
            path=str(path),
        )
    _check_names(path, classes)
    files = list_classes(path, classes)
    class_to_idx = {name: i for i, name in enumerate(classes)}
    samples = [(file, class_to_idx[name]) for name, images in files.items() for file in images]
    counts = Counter(target for _, target in samples)
    empty = [name for name, target in class_to_idx.items() if not counts[target]]
    if empty:
        raise UsageError(
            f"{path} has class folders without images: {', '.join(map(repr, empty))}. Fill or remove them; "
            f"image files end in {', '.join(IMG_EXTENSIONS)}",
            code="data.empty_classes",
            path=str(path),
            classes=empty,
        )
    images = np.array([os.fsencode(os.path.relpath(image, path)) for image, _ in samples])
    return Folder(path, classes, images, np.array([target for _, target in samples], dtype=np.int64))


def _check_names(path: Path, classes: list[str]) -> None:
    """Raise UsageError for a name that no UTF-8 file can hold: names go to JSON, CSV and HTML files."""
    for name in classes:
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                f"{path} has the class folder {os.fsencode(name)!r}, whose name is not UTF-8: rename it",
                code="data.class_name",
                path=str(path),
                class_name=name,
            ) from error


def _check_same_classes(train: Folder, val: Folder) -> None:
    only = {
        folder.path: sorted(set(folder.classes) - set(other.classes)) for folder, other in ((train, val), (val, train))
    }
    lines = [f"only in {path}: {', '.join(map(repr, names))}" for path, names in only.items() if names]
    if lines:
        raise UsageError(
            f"the class folders of train/ and val/ differ: {'; '.join(lines)}. Both need the same classes",
            code="data.classes_differ",
            only={str(path): names for path, names in only.items() if names},
        )
