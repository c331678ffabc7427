"""The reference of layer_norm_residual, then that of mlp or an MLP with 8-bit products."""

import torch
from torch import Tensor

from vitkernels.ops import eight_bit_products
from vitkernels.ops.layer_norm_residual import reference as first
from vitkernels.ops.mlp import reference as second


def unsupported(*args) -> None:
    """Accept every call."""


def run(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype, eight_bit=None) -> tuple[Tensor, Tensor]:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    total, normed = first.run(x, branch, norm_weight, norm_bias, *settings)
    with torch.autocast(x.device.type, enabled=False):
        if eight_bit is not None:
            y_MO = eight_bit_products.mlp(normed.flatten(0, -2), weight1, bias1, weight2, None, eight_bit)
            return total, y_MO.view(*x.shape[:-1], len(weight2))
        return total, second.run(normed, weight1, bias1, weight2, None, tanh, keep)
