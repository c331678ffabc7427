"""A Triton matrix product with bias and GELU in its epilogue, for any NVIDIA GPU."""

import torch
from torch import Tensor

from vitkernels.ops.linear_gelu import passes
from vitkernels.ops.linear_gelu.operators import linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    N, K = weight_NK.shape
    if K % 16 or N % 16 or not K or not N:
        return f"rows are loaded in groups of 16; weight is {N} x {K}. Use backend='passes'"
    if x.dtype == torch.float32 and x.device.type == "cuda":
        return "tiles are tuned for 16-bit tensor cores; x is float32. Use backend='passes'"
    return passes.unsupported(x, weight_NK, bias_N, tanh)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "triton")[0]
