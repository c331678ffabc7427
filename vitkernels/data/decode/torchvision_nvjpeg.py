"""JPEG files decoded on an NVIDIA GPU by torchvision's binding of nvJPEG."""

import torch
from torch import Tensor


def decode(files: list[Tensor]) -> list[Tensor]:
    """Return the images uint8 (3, H, W), on the current GPU, of JPEG files uint8 (bytes,) on the host.

    RuntimeError if one of them cannot be decoded.
    """
    from torchvision.io import ImageReadMode, decode_jpeg

    # torchvision decodes on a stream of its own, into memory that waiting work of the current stream may still use.
    torch.cuda.current_stream().synchronize()
    return decode_jpeg(files, ImageReadMode.RGB, torch.device("cuda", torch.cuda.current_device()))
