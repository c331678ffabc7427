"""Decode JPEG files through simplejpeg, a binding of libjpeg-turbo."""

import io
import re

import numpy as np
from PIL import Image

from vitkernels.data.decode.contract import NotSupported, upright, upright_size
from vitkernels.data.decode.jpeg_header import START, cut_below, read_header
from vitkernels.data.decode.pillow import orientation_of

_COLORSPACES = ("YCbCr", "Gray", "RGB")  # the others (CMYK, YCCK) need a color profile
_BYTES_LEFT = re.compile("extraneous bytes before marker 0xd[0-79]")  # before RSTn or EOI: the rest of a cut file


class TurboImage:
    """An ImageFile of a JPEG in RGB or gray. Raises NotSupported for everything else."""

    fallback: str | None = None

    def __init__(self, data: bytes):
        if not data.startswith(START):
            raise NotSupported("not a JPEG file")
        from simplejpeg import decode_jpeg_header

        try:
            height, width, colorspace, _ = decode_jpeg_header(data)
        except ValueError as error:
            raise NotSupported(f"JPEG header: {error}") from None
        if colorspace not in _COLORSPACES:
            raise NotSupported(f"JPEG in {colorspace}")
        self.data = data
        self.warnings: list[str] = []
        self._header = read_header(data)
        self._orientation = orientation_of(Image.open(io.BytesIO(data))) if self._header.has_exif else 1
        self._height, self._width = height, width
        self.size = upright_size((width, height), self._orientation)

    def decode(self, reduction: int = 1, rows: int | None = None) -> np.ndarray:
        from simplejpeg import decode_jpeg

        pixels = self._decode_above(rows) if rows is not None and reduction == self._orientation == 1 else None
        if pixels is not None:
            return pixels
        least = {"min_height": -(-self._height // reduction), "min_width": -(-self._width // reduction)}
        try:
            pixels = decode_jpeg(self.data, **least) if reduction > 1 else decode_jpeg(self.data)
        except ValueError as error:
            raise NotSupported(f"JPEG: {error}") from None
        return upright(pixels, self._orientation)

    def _decode_above(self, rows: int) -> np.ndarray | None:
        """Return at least the first `rows` rows; None if all must be decoded, or if the file proves to be damaged."""
        from simplejpeg import decode_jpeg

        cut = cut_below(self.data, self._header, rows)
        if cut is None:
            return None
        data, height = cut
        pixels = np.empty((height, self._width, 3), np.uint8)
        try:
            decode_jpeg(data, buffer=pixels)
        except ValueError as warning:  # only libjpeg's first: another one means damage within the rows
            return pixels if _BYTES_LEFT.search(str(warning)) else None
        return pixels
