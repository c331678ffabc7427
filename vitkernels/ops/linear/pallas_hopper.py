"""A Mosaic-GPU Pallas product for NVIDIA Hopper, the bias added on the way out; gradients as those of `triton`."""

import torch
from torch import Tensor

from vitkernels.bridge import hopper
from vitkernels.ops.linear.operators import linear

DTYPES = (torch.bfloat16, torch.float16)

_reason = hopper.unavailable()  # here and not at the first call, because torch.compile would trace an import


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    reason = why_not(x, weight_NK)
    return reason and f"{reason}. Use backend='triton'"


def why_not(x: Tensor, weight_NK: Tensor) -> str | None:
    """Why the kernels cannot multiply these; None: they can."""
    if x.device.type != "cuda":
        return f"its kernels are for NVIDIA Hopper GPUs; x is on {x.device}"
    if _reason is not None:
        return _reason
    if x.dtype not in DTYPES:
        return f"its kernels multiply bfloat16 and float16, and x is {x.dtype}"
    N, K = weight_NK.shape
    if K % 64 or N % 128 or not K or not N:
        return f"its tiles take inputs in steps of 64 and outputs in steps of 128; weight is {N} x {K}"
    rows = x.shape[:-1].numel()
    if rows % 8 or not rows:
        return f"it copies rows in groups of 8, and x has {rows}"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    return linear(x, weight_NK, weight_NK.detach().to(x.dtype), bias_N, is_qkv, "pallas_hopper")
