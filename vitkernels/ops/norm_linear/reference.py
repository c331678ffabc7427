"""The references of layer_norm_residual and linear, one after the other."""

import torch
from torch import Tensor

from vitkernels.ops.layer_norm_residual import reference as first
from vitkernels.ops.linear import reference as second


def unsupported(*args) -> None:
    """Accept every call."""


def run(norm, weight_FC, bias_F, eps, is_qkv, out_dtype) -> tuple[Tensor, Tensor]:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    total, normed = first.run(x, branch, norm_weight, norm_bias, *settings)
    with torch.autocast(x.device.type, enabled=False):
        return total, second.run(normed, weight_FC.to(out_dtype), bias_F, is_qkv)
