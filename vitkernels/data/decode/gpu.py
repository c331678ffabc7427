"""JPEG files for the training GPU: a worker reads the header, and nvJPEG decodes on the device.

Shapes: H, W of a decoded image.
"""

import io

import numpy as np
import torch
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from torch import Tensor

from vitkernels.data.decode.contract import NotSupported, upright_size
from vitkernels.data.decode.jpeg_header import START, is_complete
from vitkernels.data.decode.pillow import orientation_of

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


def nvjpeg(files: list[Tensor]) -> list[Tensor]:
    """Return the images uint8 (3, H, W), on the current GPU, of JPEG files uint8 (bytes,) on the host.

    RuntimeError if one of them cannot be decoded.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    # torchvision decodes on a stream of its own, into memory that waiting work of the current stream may still use.
    torch.cuda.current_stream().synchronize()
    return decode_jpeg(files, ImageReadMode.RGB, torch.device("cuda", torch.cuda.current_device()))
