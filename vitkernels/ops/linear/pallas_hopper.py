"""A Mosaic-GPU Pallas product for NVIDIA Hopper with the bias in its epilogue; gradients as in `triton`."""

import torch
from torch import Tensor

from vitkernels.bridge import hopper
from vitkernels.ops.linear.operators import linear

DTYPES = (torch.bfloat16, torch.float16)

_reason = hopper.unavailable()  # at import, because torch.compile cannot trace the check


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    reason = unsupported_product(x, weight_NK)
    return reason and f"{reason}. Use backend='triton'"


def unsupported_product(x: Tensor, weight_NK: Tensor) -> str | None:
    """Return why the Hopper kernels cannot multiply x by weightᵀ; None if they can."""
    if x.device.type != "cuda":
        return f"the kernels run on NVIDIA Hopper GPUs; x is on {x.device}"
    if _reason is not None:
        return _reason
    if x.dtype not in DTYPES:
        return f"the kernels multiply bfloat16 and float16; x is {x.dtype}"
    N, K = weight_NK.shape
    if K % 64 or N % 128 or not K or not N:
        return f"tiles need inputs in multiples of 64 and outputs in multiples of 128; weight is {N} x {K}"
    rows = x.shape[:-1].numel()
    if rows % 8 or not rows:
        return f"rows are copied in groups of 8; x has {rows}"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    return linear(x, weight_NK, weight_NK.detach().to(x.dtype), bias_N, is_qkv, "pallas_hopper")
