"""Mosaic-GPU Pallas products for NVIDIA Hopper, with GELU and its gradient in epilogues that overlap with them."""

from torch import Tensor

from vitkernels.ops.linear.pallas_hopper import unsupported_product
from vitkernels.ops.linear_gelu.operators import linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    reason = unsupported_product(x, weight_NK)
    return reason and f"{reason}. Use backend='passes'"


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "pallas_hopper")[0]
