"""The references of layer_norm_residual and mlp, one after the other."""

import torch
from torch import Tensor

from vitkernels.ops.layer_norm_residual import reference as first
from vitkernels.ops.mlp import reference as second


def unsupported(*args) -> None:
    """Accept every call."""


def run(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype) -> tuple[Tensor, Tensor]:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    total, normed = first.run(x, branch, norm_weight, norm_bias, *settings)
    with torch.autocast(x.device.type, enabled=False):
        return total, second.run(normed, weight1, bias1, weight2, None, tanh, keep)
