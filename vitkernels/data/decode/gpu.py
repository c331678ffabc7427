"""JPEG files for the training GPU: a worker reads the header, and the device decodes.

Shapes: H, W of a decoded image.
"""

import io
import logging
from collections.abc import Callable

import numpy as np
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from vitkernels.data.decode import nvimagecodec, torchvision_nvjpeg
from vitkernels.data.decode.contract import NotSupported, upright_size
from vitkernels.data.decode.jpeg_header import START, is_complete
from vitkernels.data.decode.pillow import orientation_of

# Maps JPEG files uint8 (bytes,) on the host to images uint8 (3, H, W), not yet upright, on the current GPU. Raises
# RuntimeError if one of them cannot be decoded.
FileDecoder = Callable[[list[Tensor]], list[Tensor]]

_SAMPLINGS = ((1, 1), (2, 1), (2, 2))  # of luma, with chroma (1, 1): 4:4:4, 4:2:2 and 4:2:0
_LARGEST = 16384  # pixels per side


class EncodedJpeg:
    """An ImageFile that the device decodes: a complete baseline JPEG in YCbCr or gray. NotSupported for all others."""

    def __init__(self, data: bytes):
        self.fallback: str | None = None
        if not data.startswith(START):
            raise NotSupported("not a JPEG file")
        try:
            image = Image.open(io.BytesIO(data))
        except Exception as error:  # the workers' decoder decides whether it is an image
            raise NotSupported(f"JPEG header: {type(error).__name__}") from None
        reason = _unsupported(image, data)
        if reason is not None:
            raise NotSupported(reason)
        self.data = data
        self.warnings: list[str] = []
        self.orientation = orientation_of(image)
        self.size = upright_size(image.size, self.orientation)

    def decode(self, reduction: int = 1, rows: int | None = None) -> np.ndarray:
        raise NotSupported("the device decodes this image")


def _unsupported(image: Image.Image, data: bytes) -> str | None:
    """Return why a worker decodes this image; None if nvJPEG does."""
    if not isinstance(image, JpegImageFile) or image.mode not in ("L", "RGB"):
        return f"JPEG in {image.mode}"
    if image.info.get("adobe_transform") == 0 or bytes(part[0] for part in image.layer) == b"RGB":
        return "JPEG in RGB"  # libjpeg recognizes it; nvJPEG would read it as YCbCr
    if "progressive" in image.info:
        return "progressive JPEG"  # nvJPEG decodes these one after another
    luma, *chroma = (part[1:3] for part in image.layer)
    if chroma and (luma not in _SAMPLINGS or set(chroma) != {(1, 1)}):
        return "JPEG with rare chroma subsampling"
    if max(image.size) > _LARGEST:
        return f"JPEG of more than {_LARGEST} pixels per side"
    if not is_complete(data):
        return "truncated JPEG"  # nvJPEG might fill in the missing part without an error
    return None


def file_decoder(log: logging.Logger) -> FileDecoder:
    """Return nvImageCodec's decoder if it is installed, else torchvision's; log which."""
    if nvimagecodec.is_installed():
        log.info("decode=cuda: nvImageCodec decodes JPEG files on the GPU")
        return nvimagecodec.decode
    log.info(
        "decode=cuda: torchvision decodes JPEG files on the GPU; it enlarges chroma by another filter than workers. "
        "nvImageCodec uses the same filter: pip install 'vitkernels[nvimagecodec]'"
    )
    return torchvision_nvjpeg.decode
