"""The references of layer_norm_residual and linear or eight_bit_linear, one after the other."""

import torch
from torch import Tensor

from vitkernels.ops.eight_bit_linear import reference as eight_bit_linear
from vitkernels.ops.layer_norm_residual import reference as first
from vitkernels.ops.linear import reference as second


def unsupported(*args) -> None:
    """Accept every call."""


def run(norm, weight_FC, bias_F, eps, is_qkv, out_dtype, eight_bit=None) -> tuple[Tensor, Tensor]:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    total, normed = first.run(x, branch, norm_weight, norm_bias, *settings)
    with torch.autocast(x.device.type, enabled=False):
        if eight_bit is not None:
            return total, eight_bit_linear.run(normed, weight_FC, bias_F, eight_bit)
        return total, second.run(normed, weight_FC.to(out_dtype), bias_F, is_qkv)
