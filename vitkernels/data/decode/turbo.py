"""Decode JPEG files through simplejpeg, a binding of libjpeg-turbo."""

import io

import numpy as np
from PIL import Image

from vitkernels.data.decode.contract import NotSupported, upright, upright_size
from vitkernels.data.decode.pillow import orientation_of

_JPEG = b"\xff\xd8\xff"
_EXIF = b"Exif\0\0"
_COLORSPACES = ("YCbCr", "Gray", "RGB")  # the others (CMYK, YCCK) need a color profile


class TurboImage:
    """An ImageFile of a JPEG in RGB or gray. Raises NotSupported for everything else."""

    fallback: str | None = None

    def __init__(self, data: bytes):
        if not data.startswith(_JPEG):
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
        self._orientation = orientation_of(Image.open(io.BytesIO(data))) if _EXIF in data else 1
        self._height, self._width = height, width
        self.size = upright_size((width, height), self._orientation)

    def decode(self, reduction: int = 1) -> np.ndarray:
        from simplejpeg import decode_jpeg

        least = {"min_height": -(-self._height // reduction), "min_width": -(-self._width // reduction)}
        try:
            pixels = decode_jpeg(self.data, **least) if reduction > 1 else decode_jpeg(self.data)
        except ValueError as error:
            raise NotSupported(f"JPEG: {error}") from None
        return upright(pixels, self._orientation)
