"""A matrix product made for Hopper GPUs: two groups of warps take turns, one multiplies while the other does GELU."""

import torch
from torch import Tensor

from vitkernels.ops.linear_gelu import triton
from vitkernels.ops.linear_gelu.operators import linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    if x.device.type != "cuda" or torch.cuda.get_device_capability(x.device)[0] != 9:
        name = torch.cuda.get_device_name(x.device) if x.device.type == "cuda" else x.device
        return f"it needs the instructions of a Hopper GPU (H100, H200); x is on {name}. Use backend='passes'"
    if x.dtype != torch.bfloat16:
        return f"it takes bfloat16, got {x.dtype}. Use backend='passes'"
    return triton.unsupported(x, weight_NK, bias_N, tanh)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, "hopper")[0]
