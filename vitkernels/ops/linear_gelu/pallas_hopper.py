"""Mosaic-GPU Pallas products for NVIDIA Hopper, with GELU and its gradient hidden behind the tensor cores' work."""

import torch
from torch import Tensor

from vitkernels.bridge import hopper
from vitkernels.ops.linear_gelu.operators import linear_gelu

DTYPES = (torch.bfloat16, torch.float16)
_INSTEAD = "Use backend='passes'"


_reason = hopper.unavailable()  # here and not at the first call, because torch.compile would trace an import


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    if x.device.type != "cuda":
        return f"its kernels are for NVIDIA Hopper GPUs; x is on {x.device}"
    if _reason is not None:
        return f"{_reason}. {_INSTEAD}"
    if x.dtype not in DTYPES:
        return f"its kernels multiply bfloat16 and float16, and x is {x.dtype}. {_INSTEAD}"
    N, K = weight_NK.shape
    if K % 64 or N % 128 or not K or not N:
        return f"its tiles take inputs in steps of 64 and outputs in steps of 128; weight is {N} x {K}. {_INSTEAD}"
    rows = x.shape[:-1].numel()
    if rows % 8 or not rows:
        return f"it copies rows in groups of 8, and x has {rows}. {_INSTEAD}"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "pallas_hopper")[0]
