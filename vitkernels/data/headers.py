"""Read image headers before training starts: unreadable and small images are found early."""

import io
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from PIL import Image

from vitkernels.data.image_source import ImageSource, SourceError
from vitkernels.errors import UsageError, unknown_name

SMALL_IMAGES = ("upscale", "error")
THREADS = 16  # headers are small reads; threads hide the latency of a disk or network file system
HEAD = 64 * 1024  # bytes, which hold the header of most images


def check_headers(
    source: ImageSource,
    image_size: int,
    *,
    check_images: int | None,
    small_images: str,
    allowed: int,
    log: logging.Logger,
) -> None:
    """Read the headers of up to `check_images` evenly spaced images (None: all) and log unreadable and small ones.

    UsageError if more than `allowed` are unreadable, as training would stop later. An image is small if its shorter
    side has less than image_size pixels; UsageError if small_images is "error".
    """
    if small_images not in SMALL_IMAGES:
        raise unknown_name("small_images", str(small_images), SMALL_IMAGES)
    total = len(source.targets)
    ids = source.spread(total if check_images is None else check_images)
    count = len(ids)
    with warnings.catch_warnings(), ThreadPoolExecutor(THREADS) as threads:
        warnings.simplefilter("ignore")  # they recur, and are logged, when the image itself is read
        sizes = list(threads.map(partial(_header, source), ids))
    log.info("%s: checked the headers of %d of %d images", source.name, count, total)

    unreadable = [i for i, size in zip(ids, sizes, strict=True) if size is None]
    if unreadable:
        example = source.describe(unreadable[0])
        finding = f"{source.name}: could not read {len(unreadable)} of {count} checked images, such as {example}"
        if len(unreadable) > allowed:
            raise UsageError(
                f"{finding}; the limit is {allowed} of {total} (max_bad_share). Fix or remove them, or raise "
                "max_bad_share; `vitkernels data check ROOT` lists all",
                code="data.bad_images",
                path=source.name,
                unreadable=len(unreadable),
                allowed=allowed,
            )
        log.warning("%s", finding)
    small = [(size, i) for i, size in zip(ids, sizes, strict=True) if size and min(size) < image_size]
    if small:
        (width, height), smallest = min(small, key=lambda entry: min(entry[0]))
        finding = (
            f"{source.name}: {len(small)} of {count} checked images are smaller than image_size={image_size}, "
            f"the smallest {width}×{height} ({source.describe(smallest)})"
        )
        if small_images == "error":
            raise UsageError(
                f"{finding}. Replace or remove them, or enlarge them with small_images='upscale'",
                code="data.small_images",
                path=source.name,
                small=len(small),
                checked=count,
            )
        log.warning("%s; they will be enlarged", finding)


def _header(source: ImageSource, index: int) -> tuple[int, int] | None:
    """Return (width, height) in pixels, or None if Pillow cannot open the image."""
    for limit in (HEAD, None):  # a header may follow a large preview
        try:
            with Image.open(io.BytesIO(source.read(index, limit))) as image:
                return image.size
        except SourceError:
            raise
        except Exception:  # a broken file can make a decoder raise almost anything
            continue
    return None
