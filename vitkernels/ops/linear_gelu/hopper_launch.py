"""Launches of the kernels for Hopper GPUs.

Shape suffixes: M rows (tokens), K the inner dimension, N columns, T tiles of rows.
"""

from functools import cache

import torch
from torch import Tensor
from triton import cdiv
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vitkernels.ops.linear_gelu.hopper_kernels import gelu_linear_backward_kernel, linear_gelu_kernel

TILE_M, TILE_N, TILE_K, STAGES = 128, 128, 64, 4  # of 227 KB shared memory the backward's buffers take 226


def forward(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor, pre_MN: Tensor, act_MN: Tensor, tanh: bool) -> None:
    """Fills pre and act."""
    factors = _tiled(x_MK, TILE_M, TILE_K), _tiled(weight_NK, TILE_N, TILE_K)
    _launch(linear_gelu_kernel, bias_N, factors, (pre_MN, act_MN), x_MK.shape[1], tanh)


def backward(
    dy_MK: Tensor, weight_KN: Tensor, pre_MN: Tensor, dpre_MN: Tensor, act_MN: Tensor, sums_TN: Tensor, tanh: bool
) -> None:
    """Fills dpre, act and sums."""
    factors = _tiled(dy_MK, TILE_M, TILE_K), _tiled(weight_KN, TILE_K, TILE_N)
    _launch(gelu_linear_backward_kernel, sums_TN, factors, (pre_MN, dpre_MN, act_MN), dy_MK.shape[1], tanh)


def _launch(kernel, plain: Tensor, factors: tuple, results: tuple[Tensor, ...], K: int, tanh: bool) -> None:
    M, N = results[0].shape
    tiled = [_tiled(x, TILE_M, TILE_N // 2) for x in results]
    programs = min(_multiprocessors(plain.device), cdiv(M, TILE_M) * cdiv(N, TILE_N))
    with torch.cuda.device(plain.device):
        kernel[(programs,)](
            plain, *factors, *tiled, M, N, K,
            TILE_M=TILE_M, TILE_N=TILE_N, TILE_K=TILE_K, STAGES=STAGES, TANH=tanh, num_warps=4,
        )  # fmt: skip


def _tiled(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(x, [rows, columns], _layout(rows, columns))


@cache
def _layout(rows: int, columns: int):
    return gl.NVMMASharedLayout.get_default_for([rows, columns], gl.bfloat16)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
