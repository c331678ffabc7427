"""JPEG files decoded on an NVIDIA GPU by nvImageCodec: by the JPEG engines of a GPU that has them, else by kernels.

https://docs.nvidia.com/cuda/nvimagecodec/py_api.html. The engines' pixels differ from libjpeg's by at most one gray
level, because nvImageCodec enlarges chroma with the same filter (notes/input.md).
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

_CPU_THREADS = 2  # that parse files; data workers occupy the other cores


def is_installed() -> bool:
    return importlib.util.find_spec("nvidia") is not None and importlib.util.find_spec("nvidia.nvimgcodec") is not None


def decode(files: list[Tensor]) -> list[Tensor]:
    """Return the images uint8 (3, H, W), on the current GPU, of JPEG files uint8 (bytes,) on the host.

    RuntimeError if one of them cannot be decoded.
    """
    from nvidia import nvimgcodec

    decoder, params = _decoder(torch.cuda.current_device())
    streams = [nvimgcodec.CodeStream(file.numpy()) for file in files]
    images = decoder.decode(streams, params=params, cuda_stream=torch.cuda.current_stream().cuda_stream)
    if any(image is None for image in images):
        raise RuntimeError("nvImageCodec cannot decode it")
    return [torch.from_dlpack(image) for image in images]


@cache
def _decoder(device: int) -> tuple[Any, Any]:
    """Return the decoder of a device, and parameters for planar RGB that is not yet upright."""
    from nvidia import nvimgcodec

    kinds = nvimgcodec.BackendKind
    # In this order: an image goes to the next backend only if the one before does not support it.
    backends = [nvimgcodec.Backend(kind) for kind in (kinds.HW_GPU_ONLY, kinds.HYBRID_CPU_GPU)]
    decoder = nvimgcodec.Decoder(device_id=device, max_num_cpu_threads=_CPU_THREADS, backends=backends)
    planar = nvimgcodec.SampleFormat.P_RGB
    return decoder, nvimgcodec.DecodeParams(apply_exif_orientation=False, sample_format=planar)
