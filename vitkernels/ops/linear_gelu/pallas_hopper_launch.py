"""The Hopper kernels on torch tensors, compiled once per shape.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

from functools import cache

import torch
from torch import Tensor

from vitkernels.bridge.mosaic_gpu import Kernel
from vitkernels.ops.linear_gelu.pallas_hopper_kernel import Backward, Forward, Product, tiles_m


def forward(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool, keep: bool) -> tuple[Tensor, Tensor]:
    """gelu(x weightᵀ + bias), and what GELU was given, or with `keep` its slope there."""
    M, K, N = *x_MK.shape, len(weight_NK)
    act_MN, saved_MN = (x_MK.new_empty(M, N) for _ in range(2))
    bias_N = x_MK.new_zeros(N, dtype=torch.float32) if bias_N is None else bias_N.float()
    kernel = _kernel(Forward, M, N, K, x_MK.dtype, tanh, keep, x_MK.device)
    with torch.cuda.device(x_MK.device):
        kernel(_aligned(x_MK), _aligned(weight_NK), bias_N, saved_MN, act_MN)
    return act_MN, saved_MN


def backward(dy_MK: Tensor, weight_KN: Tensor, saved_MN: Tensor, tanh: bool, kept: bool) -> tuple[Tensor, Tensor]:
    """dpre = (dy weight) gelu'(pre), and its sums over the rows of each tile."""
    M, K, N = *dy_MK.shape, weight_KN.shape[1]
    kernel = _kernel(Backward, M, N, K, dy_MK.dtype, tanh, kept, dy_MK.device)
    dpre_MN, sums_TN = torch.empty_like(saved_MN), saved_MN.new_empty(tiles_m(M), N, dtype=torch.float32)
    with torch.cuda.device(dy_MK.device):
        kernel(_aligned(dy_MK), _aligned(weight_KN), _aligned(saved_MN), dpre_MN, sums_TN)
    return dpre_MN, sums_TN


@cache
def _kernel(kind: type[Product], M: int, N: int, K: int, dtype: torch.dtype, tanh: bool, keep: bool, device) -> Kernel:
    pairs = torch.cuda.get_device_properties(device).multi_processor_count // 2
    product = kind(M, N, K, str(dtype).removeprefix("torch."), tanh, keep, pairs)
    return Kernel(product, product.inputs())


def _aligned(x: Tensor) -> Tensor:
    """x where the copy engine can read it: at an address divisible by 16."""
    return x if x.data_ptr() % 16 == 0 else x.clone()
