"""Run the Hopper kernels on torch tensors, compiled once per shape.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import aligned
from vitkernels.ops.linear.pallas_hopper_kernel import tiles_m
from vitkernels.ops.linear.pallas_hopper_launch import compiled, launch_forward
from vitkernels.ops.linear_gelu.pallas_hopper_kernel import GeluLinearBackward, LinearGelu


def forward(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return gelu(x weightᵀ + bias) and the pre-activation, or with `keep` GELU's slope there."""
    act_MN, saved_MN = (x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]) for _ in range(2))
    launch_forward(LinearGelu, x_MK, weight_NK, bias_N, (saved_MN, act_MN), tanh, keep)
    return act_MN, saved_MN


def backward(dy_MK: Tensor, weight_KN: Tensor, saved_MN: Tensor, tanh: bool, kept: bool) -> tuple[Tensor, Tensor]:
    """Return dpre = (dy weight) gelu'(pre) and its sums over the rows of each tile."""
    M, N = saved_MN.shape
    kernel = compiled(GeluLinearBackward, *dy_MK.shape, N, dy_MK.dtype, dy_MK.device, tanh, kept)
    dpre_MN, sums_TN = torch.empty_like(saved_MN), saved_MN.new_empty(tiles_m(M), N, dtype=torch.float32)
    kernel(aligned(dy_MK), aligned(weight_KN), aligned(saved_MN), dpre_MN, sums_TN)
    return dpre_MN, sums_TN
