"""Decode every format that Pillow supports."""

import io

import numpy as np
from PIL import Image, UnidentifiedImageError

from vitkernels.data.decode.contract import upright, upright_size
from vitkernels.data.decode.pillow_warnings import collected

ORIENTATION = 0x0112  # the EXIF tag


def why_unreadable(error: Exception) -> str:
    """Return the reason why a file could not be opened or decoded."""
    if isinstance(error, UnidentifiedImageError):  # its own message names an object in memory
        return "not an image format that Pillow supports"
    return f"{type(error).__name__}: {error}"


class PillowImage:
    """An ImageFile of any format and color mode, always decoded at its full size. Raises what Pillow raises."""

    def __init__(self, data: bytes, fallback: str | None = None):
        self.data, self.fallback = data, fallback
        with collected() as self.warnings:
            self._image: Image.Image = Image.open(io.BytesIO(data))
            self._orientation = orientation_of(self._image)
        self.size = upright_size(self._image.size, self._orientation)

    def decode(self, reduction: int = 1, rows: int | None = None) -> np.ndarray:
        image = self._image
        with collected() as warnings:
            if image.mode.startswith("I;16"):  # Pillow would clip 16 bits to 8, turning most such images white
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            if image.mode in ("I", "F"):
                raise ValueError(f"32-bit pixels (mode {image.mode}) have no known range: convert the file to 8 bits")
            pixels = upright(np.asarray(image.convert("RGB")), self._orientation)
        self.warnings += warnings
        return pixels


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; 1 if the image has none or its EXIF data is damaged."""
    if "exif" not in image.info:
        return 1
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # the parser raises almost anything on damaged data, and the pixels may be intact
        return 1
