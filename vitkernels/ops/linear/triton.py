"""The library's product; gradients of the parameters by kernels."""

import torch
from torch import Tensor

from vitkernels.ops.linear.operators import linear

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    if x.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs; x is on {x.device}"
    if x.dtype not in _FLOATS:
        return f"it calculates in float32; {x.dtype} would lose digits. Use backend='reference'"
    if not weight_NK.numel():
        return f"weight is {tuple(weight_NK.shape)}: nothing to multiply with. Use backend='reference'"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    return linear(x, weight_NK, weight_NK.detach().to(x.dtype), bias_N, is_qkv, "triton")
