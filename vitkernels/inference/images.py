"""Read image files for a trained model: folders of any size, in batches, with unreadable files named.

Shapes: B rows, C channels, S image side.
"""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import Image
from torchvision.datasets.folder import IMG_EXTENSIONS

from vitkernels.data.decode import Decoder, why_unreadable
from vitkernels.errors import UsageError
from vitkernels.models.timm_config import Transform

THREADS = min(16, os.cpu_count() or 1)  # Pillow decodes without Python's lock
BATCHES_AHEAD = 2


@dataclass(frozen=True)
class ImageBatch:
    """Files and their images, float32 (B, C, S, S); `unreadable` maps the files without an image to the reason."""

    files: list[str]
    images: torch.Tensor
    unreadable: dict[str, str]


def find_images(paths: Iterable[str | Path]) -> Iterator[str]:
    """Yield the files that are named, and the images of folders and their subfolders, sorted within each.

    Raises UsageError, "inference.no_images", for a path that does not exist and for a folder without images.
    """
    for path in paths:
        if os.path.isfile(path):
            yield str(path)
            continue
        found = False
        for file in _walk(str(path)) if os.path.isdir(path) else ():
            found = True
            yield file
        if not found:
            reason = f"has no images ({', '.join(IMG_EXTENSIONS)})" if os.path.isdir(path) else "does not exist"
            raise UsageError(
                f"{path} {reason}: name image files or folders", code="inference.no_images", path=str(path)
            )


def _walk(folder: str) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders.sort()  # os.walk descends in this order
        yield from (os.path.join(parent, name) for name in sorted(names) if name.lower().endswith(IMG_EXTENSIONS))


def read_batches(files: Iterable[str], transform: Transform, channels: int, batch_size: int) -> Iterator[ImageBatch]:
    """Yield batches of up to `batch_size` images in the files' order, decoded ahead by threads."""
    with ThreadPoolExecutor(THREADS) as threads:
        ahead: deque[tuple[str, Future]] = deque()
        batch: list[tuple[str, torch.Tensor | str]] = []
        for file in files:
            ahead.append((file, threads.submit(_read, file, transform, channels)))
            if len(ahead) >= BATCHES_AHEAD * batch_size:
                name, image = ahead.popleft()
                batch.append((name, image.result()))
            if len(batch) == batch_size:
                yield _batch(batch)
                batch = []
        while ahead:
            name, image = ahead.popleft()
            batch.append((name, image.result()))
            if len(batch) == batch_size or not ahead:
                yield _batch(batch)
                batch = []


def _read(file: str, transform: Transform, channels: int) -> torch.Tensor | str:
    """Return the image, (C, S, S), or the reason why the file cannot be read."""
    try:
        return transform(as_input(file, channels))
    except UsageError:
        raise
    except Exception as error:  # a broken file can make a decoder raise almost anything
        return why_unreadable(error)


def as_input(file: str, channels: int) -> Image.Image:
    """Return the decoded file in the mode of the model's channels: RGB, or gray for one channel."""
    if channels not in (1, 3):
        raise UsageError(f"image files have 1 or 3 channels, and the model takes {channels}", code="inference.channels")
    decoder = Decoder("pillow")  # as in evaluations: upright, 8 bits
    image = Image.fromarray(decoder.decode(decoder.open(Path(file).read_bytes())))
    return image.convert("L") if channels == 1 else image


def _batch(read: list[tuple[str, torch.Tensor | str]]) -> ImageBatch:
    images = {file: image for file, image in read if isinstance(image, torch.Tensor)}
    unreadable = {file: reason for file, reason in read if isinstance(reason, str)}
    return ImageBatch([*images], torch.stack([*images.values()]) if images else torch.empty(0), unreadable)
