"""Decoders of encoded images to upright 8-bit RGB, chosen by name.

`pillow` reads every format, and its images are resized by Pillow, too: it is the reference. `turbo` reads JPEG files
    through simplejpeg, a binding of libjpeg-turbo, at a reduced scale if the crop is much larger than the output, and
    resizes with torch; Pillow reads all other files. Both apply the EXIF orientation.
"""

import importlib.util
from collections.abc import Callable

import numpy as np

from vitkernels.data.decode import pillow, turbo
from vitkernels.data.decode.contract import ImageFile, NotSupported
from vitkernels.errors import UsageError, unknown_name

NAMES = ("auto", "pillow", "turbo")

__all__ = ["NAMES", "Decoder", "ImageFile", "choose_decoder"]


class Decoder:
    """Opens encoded images with the named decoder, and with Pillow those that it does not support.

    name: "pillow" or "turbo".
    is_reference: whether images are also resized by Pillow, which makes them equal to timm's bit for bit.
    """

    def __init__(self, name: str):
        self.name = name
        self.is_reference = name == "pillow"
        self._open: Callable[[bytes], ImageFile] = {"pillow": pillow.PillowImage, "turbo": turbo.TurboImage}[name]

    def open(self, data: bytes) -> ImageFile:
        """Return the image of a file's bytes, with only its header read. Raises what Pillow raises."""
        try:
            return self._open(data)
        except NotSupported as reason:
            return pillow.PillowImage(data, fallback=str(reason))

    def decode(self, image: ImageFile, reduction: int = 1) -> np.ndarray:
        """Return image.decode(reduction); a JPEG that `turbo` reports as damaged is decoded again by Pillow.

        Pillow decides whether a damaged file is an image, so the decision does not depend on the decoder.
        """
        try:
            return image.decode(reduction)
        except NotSupported:
            again = pillow.PillowImage(image.data)
            image.warnings += again.warnings
            return again.decode(reduction)


def choose_decoder(name: str) -> Decoder:
    """Return the decoder of this name; "auto" is turbo if simplejpeg is installed, else pillow.

    Raises UsageError for an unknown name, and for "turbo" without simplejpeg.
    """
    if name not in NAMES:
        raise unknown_name("decode", str(name), NAMES)
    has_turbo = importlib.util.find_spec("simplejpeg") is not None
    if name == "turbo" and not has_turbo:
        raise UsageError(
            "decode='turbo' needs simplejpeg, which is not installed: pip install simplejpeg, or use decode='pillow'",
            code="data.decode",
            decode=name,
        )
    return Decoder(("turbo" if has_turbo else "pillow") if name == "auto" else name)
