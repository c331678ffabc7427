"""Decoders of encoded images to upright 8-bit RGB, chosen by name.

`pillow` reads every format, and its images are resized by Pillow, too: it is the reference. `turbo` reads JPEG files
    through simplejpeg, a binding of libjpeg-turbo, only down to the end of the crop, and at a reduced scale if the crop
    is much larger than the output. It resizes with torch; Pillow reads all other files. Both apply the EXIF
    orientation.
"""

import importlib.util
from collections.abc import Callable

import numpy as np

from vitkernels.data.decode import gpu, pillow, turbo
from vitkernels.data.decode.contract import ImageFile, NotSupported
from vitkernels.data.decode.pillow import why_unreadable
from vitkernels.errors import UsageError, unknown_name

NAMES = ("auto", "pillow", "turbo", "cuda")

__all__ = ["NAMES", "Decoder", "ImageFile", "choose_decoder", "why_unreadable"]


class Decoder:
    """Opens encoded images with the named decoder, or with another one if it does not support them.

    name: "pillow", "turbo" or "cuda".
    is_reference: whether images are also resized by Pillow, which makes them equal to timm's bit for bit.
    passes_on_pixels: whether workers pass decoded crops on, for the device to resize.
    in_worker: the decoder that worker processes use: this one, or for "cuda" the one for files that the GPU does not
        decode.
    """

    def __init__(self, name: str, passes_on_pixels: bool = False):
        self.name = name
        self.passes_on_pixels = passes_on_pixels
        self.is_reference = name == "pillow"
        self.in_worker = Decoder("turbo" if _has_turbo() else "pillow") if name == "cuda" else self
        self._open: Callable[[bytes], ImageFile] = _IMAGES[name]

    def open(self, data: bytes) -> ImageFile:
        """Return the image of a file's bytes, with only its header read. Raises what Pillow raises."""
        try:
            return self._open(data)
        except NotSupported as reason:
            return self.open_in_worker(data, str(reason))

    def open_in_worker(self, data: bytes, reason: str) -> ImageFile:
        """Return the image, opened by the workers' decoder; reason: why this decoder does not open it."""
        if self.in_worker is self:
            return pillow.PillowImage(data, fallback=reason)
        image = self.in_worker.open(data)
        image.fallback = reason
        return image

    def decode(self, image: ImageFile, reduction: int = 1, rows: int | None = None) -> np.ndarray:
        """Return image.decode(reduction, rows) of an image opened in a worker.

        A JPEG that `turbo` reports as damaged is decoded again by Pillow, which decides whether a damaged file is an
        image, so the decision does not depend on the decoder.
        """
        try:
            return image.decode(reduction, rows)
        except NotSupported:
            again = pillow.PillowImage(image.data)
            image.warnings += again.warnings
            return again.decode(reduction)


_IMAGES: dict[str, Callable[[bytes], ImageFile]] = {
    "pillow": pillow.PillowImage,
    "turbo": turbo.TurboImage,
    "cuda": gpu.EncodedJpeg,
}


def _has_turbo() -> bool:
    return importlib.util.find_spec("simplejpeg") is not None


def choose_decoder(name: str, on_gpu: bool = False) -> Decoder:
    """Return the decoder of this name; "auto" is turbo if simplejpeg is installed, else pillow.

    on_gpu: whether this process copies its batches to an NVIDIA GPU.
    Raises UsageError for an unknown name, for "turbo" without simplejpeg, and for "cuda" without the GPU.
    """
    if name not in NAMES:
        raise unknown_name("decode", str(name), NAMES)
    if name == "cuda" and not on_gpu:
        raise UsageError(
            "decode='cuda' needs an NVIDIA GPU, and this run does not use one: set decode='auto', 'turbo' "
            "or 'pillow', or train on the GPU (pin_memory=True for your own loader)",
            code="data.decode",
            decode=name,
        )
    has_turbo = _has_turbo()
    if name == "turbo" and not has_turbo:
        raise UsageError(
            "decode='turbo' needs simplejpeg, which is not installed: pip install simplejpeg, or use decode='pillow'",
            code="data.decode",
            decode=name,
        )
    return Decoder(("turbo" if has_turbo else "pillow") if name == "auto" else name)
