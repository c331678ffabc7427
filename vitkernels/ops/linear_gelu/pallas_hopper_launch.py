"""Run the Hopper kernels on torch tensors, compiled once per shape.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

import torch
from torch import Tensor

from vitkernels.bridge.mosaic_gpu import Kernel
from vitkernels.bridge.operator import aligned
from vitkernels.ops.linear.pallas_hopper_kernel import tiles_m
from vitkernels.ops.linear.pallas_hopper_launch import forward_kernel, kernel_of, launch_forward
from vitkernels.ops.linear_gelu.pallas_hopper_kernel import GeluLinearBackward, LinearGelu


def start(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool, keep: bool) -> None:
    """Start to compile the kernel of `forward` for x (..., K), before the call or while it is traced."""
    forward_kernel(LinearGelu, x, weight_NK, bias_N, tanh, keep).start(x.device)


def start_backward(x: Tensor, weight_KN: Tensor, tanh: bool, kept: bool) -> None:
    """Start to compile the kernel of `backward` for a dy with the rows, dtype and device of x (..., any)."""
    _backward_kernel(x.shape[:-1].numel(), weight_KN, x.dtype, x.device, tanh, kept).start(x.device)


def forward(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """Return gelu(x weightᵀ + bias) and the pre-activation, or with `keep` GELU's slope there."""
    act_MN, saved_MN = (x_MK.new_empty(x_MK.shape[0], weight_NK.shape[0]) for _ in range(2))
    launch_forward(LinearGelu, x_MK, weight_NK, bias_N, (saved_MN, act_MN), tanh, keep)
    return act_MN, saved_MN


def backward(dy_MK: Tensor, weight_KN: Tensor, saved_MN: Tensor, tanh: bool, kept: bool) -> tuple[Tensor, Tensor]:
    """Return dpre = (dy weight) gelu'(pre) and its sums over the rows of each tile."""
    M, N = saved_MN.shape
    kernel = _backward_kernel(M, weight_KN, dy_MK.dtype, dy_MK.device, tanh, kept)
    dpre_MN, sums_TN = torch.empty_like(saved_MN), saved_MN.new_empty(tiles_m(M), N, dtype=torch.float32)
    kernel(aligned(dy_MK), aligned(weight_KN), aligned(saved_MN), dpre_MN, sums_TN)
    return dpre_MN, sums_TN


def _backward_kernel(M: int, weight_KN: Tensor, dtype: torch.dtype, device, tanh: bool, kept: bool) -> Kernel:
    return kernel_of(GeluLinearBackward, M, *weight_KN.shape, dtype, device, tanh, kept)
