"""Interface of the decoders.

Shapes: H height and W width of an upright image.
"""

from typing import Protocol

import numpy as np

REDUCTIONS = (1, 2, 4, 8)  # the scales 1/n at which libjpeg can decode


class NotSupported(Exception):
    """A decoder does not support an image; the message says why. The image then goes to Pillow."""


class ImageFile(Protocol):
    """An encoded image of which only the header has been read.

    data: the file's bytes.
    size: (width, height) in pixels after the EXIF orientation is applied.
    warnings: the decoder's warnings while it read the header and, later, the pixels.
    fallback: why Pillow decodes the image instead of the requested decoder; None if it does not.
    """

    data: bytes
    size: tuple[int, int]
    warnings: list[str]
    fallback: str | None

    def decode(self, reduction: int = 1, rows: int | None = None) -> np.ndarray:
        """Return the upright image, uint8 (H, W, 3).

        reduction: one of REDUCTIONS; the image has ceil(side / reduction) pixels per side, or its full size if the
            decoder cannot reduce it.
        rows: without a reduction, how many rows from the top are needed, None for all. A decoder may omit the rest.
        """


def upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Return pixels (H, W, 3) with the EXIF orientation 1 to 8 applied (Exif 2.32, section 4.6.4); others are as 1."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def upright_size(size: tuple[int, int], orientation: int) -> tuple[int, int]:
    """Return (width, height) after the EXIF orientation is applied."""
    return (size[1], size[0]) if orientation in (5, 6, 7, 8) else size
