"""List an image folder, and check its classes and image headers before training starts.

Layout: root/train/<class>/…/<image> and root/val/<class>/…/<image>.
"""

import logging
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS, find_classes, make_dataset

from vitkernels.errors import UsageError, unknown_name

LAYOUT = "expected ROOT/train/<class>/<image>.jpg and ROOT/val/<class>/<image>.jpg"
SMALL_IMAGES = ("upscale", "error")
THREADS = 16  # headers are small reads; threads hide the latency of a disk or network file system


@dataclass(frozen=True)
class Folder:
    """The images of one split."""

    path: Path
    classes: list[str]
    images: np.ndarray  # bytes (N,), relative to path: one block of memory, cheap to pickle for workers
    targets: np.ndarray  # int64 (N,)

    def image_path(self, index: int) -> str:
        return os.path.join(self.path, os.fsdecode(self.images[index]))


def scan_splits(root: str | None, splits: list[str]) -> dict[str, Folder]:
    """List the images of each split. UsageError if the folder cannot be trained or evaluated on."""
    if not root:
        raise UsageError(f"root is not set: set it to the image folder; {LAYOUT}", code="data.root", root=root)
    if not isinstance(root, str | os.PathLike):
        raise UsageError(f"root={root}: expected the path of a folder; {LAYOUT}", code="data.root", root=root)
    path = Path(root).expanduser().absolute()
    if not path.is_dir():
        kind = "is not a folder" if path.exists() else "does not exist"
        raise UsageError(f"root={path} {kind}: set it to the image folder; {LAYOUT}", code="data.root", root=str(path))
    missing = [split for split in splits if not (path / split).is_dir()]
    if missing:
        found = sorted(entry.name for entry in path.iterdir())[:10]
        raise UsageError(
            f"root={path} has no {' and no '.join(f'{split}/ folder' for split in missing)} "
            f"(it contains: {', '.join(found) or 'nothing'}); {LAYOUT}",
            code="data.splits",
            root=str(path),
            missing=missing,
            found=found,
        )
    folders = {split: _scan(path / split) for split in splits}
    if len(folders) == 2:
        _check_same_classes(*folders.values())
    return folders


def _scan(path: Path) -> Folder:
    try:
        classes, class_to_idx = find_classes(path)
    except FileNotFoundError:
        raise UsageError(
            f"{path} has no class folders: move each image into a folder named after its class",
            code="data.no_classes",
            path=str(path),
        ) from None
    if len(classes) == 1:
        raise UsageError(
            f"{path} has only one class folder, {classes[0]!r}, and training needs at least two: add the other classes",
            code="data.one_class",
            path=str(path),
        )
    samples = make_dataset(path, class_to_idx, extensions=IMG_EXTENSIONS, allow_empty=True)
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


def check_headers(
    folder: Folder, image_size: int, *, check_images: int | None, small_images: str, log: logging.Logger
) -> None:
    """Read the headers of up to `check_images` evenly spaced images (None: all) and log unreadable and small ones.

    An image is small if its shorter side has less than image_size pixels; UsageError if small_images is "error".
    """
    if small_images not in SMALL_IMAGES:
        raise unknown_name("small_images", str(small_images), SMALL_IMAGES)
    total = len(folder.images)
    count = total if check_images is None else min(check_images, total)
    ids = np.linspace(0, total - 1, count).round().astype(int).tolist()
    paths = [folder.image_path(i) for i in ids]
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as threads:
        warnings.simplefilter("ignore")  # they recur, and are logged, when the image itself is read
        sizes = list(threads.map(_header, paths))
    log.info("%s: checked the headers of %d of %d images", folder.path, count, total)

    unreadable = [path for path, size in zip(paths, sizes, strict=True) if size is None]
    if unreadable:
        log.warning(
            "%s: could not read %d of %d checked images, such as %s", folder.path, len(unreadable), count, unreadable[0]
        )
    small = [(size, path) for path, size in zip(paths, sizes, strict=True) if size and min(size) < image_size]
    if small:
        (width, height), smallest = min(small, key=lambda entry: min(entry[0]))
        finding = (
            f"{folder.path}: {len(small)} of {count} checked images are smaller than image_size={image_size}, "
            f"the smallest {width}×{height} ({smallest})"
        )
        if small_images == "error":
            raise UsageError(
                f"{finding}. Replace or remove them, or enlarge them with small_images='upscale'",
                code="data.small_images",
                path=str(folder.path),
                small=len(small),
                checked=count,
            )
        log.warning("%s; they will be enlarged", finding)


def _header(path: str) -> tuple[int, int] | None:
    """Return (width, height) in pixels, or None if Pillow cannot open the file."""
    try:
        with Image.open(path) as image:
            return image.size
    except Exception:  # a broken file can make a decoder raise almost anything
        return None
