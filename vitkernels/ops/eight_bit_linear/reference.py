"""Passes that round the operands, then products."""

import torch
from torch import Tensor

from vitkernels.ops import eight_bit_products
from vitkernels.ops.linear import reference as linear


def unsupported(*args) -> None:
    """Accept every call."""


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not x.numel():
        return linear.run(x, weight_NK.to(x.dtype), bias_N, False)
    y_MN = eight_bit_products.linear(x.reshape(-1, x.shape[-1]), weight_NK, bias_N, dtype)
    return y_MN.reshape(*x.shape[:-1], len(weight_NK))
