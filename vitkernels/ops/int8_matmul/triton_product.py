"""Launches the 8-bit products: from tensors to tiles and a grid.

Tiles are chosen here once and for all, from measurements on one H200: the first call searches nothing.
Shape suffixes: M rows, K the summed dimension, N columns, R rows of either operand.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitkernels.bridge.triton import triton_call
from vitkernels.ops.int8_matmul.triton_kernel import copy_kernel, product_kernel

_COPY_BYTES = 16  # what a descriptor's rows and their distances are multiples of


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile; warps per program; loads under way; tile rows that share operands.

    resident: as many programs as multiprocessors, each with many tiles; otherwise a program per tile.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int = 3
    group: int = 8
    resident: bool = False


def product(
    x_MK: Tensor,
    w_KN: Tensor,
    out_dtype: torch.dtype,
    x_scale_M: Tensor | None = None,
    w_scale_N: Tensor | None = None,
    tiles: Tiles | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """x @ w · x_scale[:, None] · w_scale + bias in out_dtype: int8 operands (int32 sums) or fp8 ones (float32 sums).

    Operands of any strides: one that does not lie in memory with K last, in rows 16 bytes apart, is copied first.
    Activations (M, K) and the transpose of weights (N, K) do lie so. Scales: float32, contiguous; bias: floating,
    contiguous; with an int32 out_dtype there are none. Nothing is checked here.
    """
    M, K = x_MK.shape
    N = w_KN.shape[1]
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    if 0 in (M, N, K):
        return out_MN.zero_() if bias_N is None else out_MN.copy_(bias_N)
    tiles = tiles or choose_tiles(M, N, x_MK.dtype)
    x_MK, w_NK = _k_last(x_MK), _k_last(w_KN.T)
    programs = -(-M // tiles.m) * -(-N // tiles.n)
    if tiles.resident and x_MK.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(x_MK.device).multi_processor_count)
    triton_call(
        TensorDescriptor(x_MK, x_MK.shape, x_MK.stride(), [tiles.m, tiles.k]),
        TensorDescriptor(w_NK, w_NK.shape, w_NK.stride(), [tiles.n, tiles.k]),
        out_MN, x_scale_M, w_scale_N, bias_N, out_MN.stride(0), M, N, K, programs,
        kernel=product_kernel, grid=(programs,),
        TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group,
        OVERLAP=tiles.resident and out_dtype.itemsize == 2,  # shared memory has no room for a tile of 4-byte results
        SUM=tl.int32 if x_MK.dtype == torch.int8 else tl.float32,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_MN


def choose_tiles(M: int, N: int, dtype: torch.dtype) -> Tiles:
    """The fastest seen on an H200 for a product of that size (notes/int8_matmul.md)."""
    if -(-M // 128) * -(-N // 128) <= 66:  # half of the multiprocessors would have nothing to do
        return Tiles(64, 64, 256, num_warps=4)
    if dtype == torch.int8 or M * N < 2048 * 2048:
        return Tiles(128, 128, 128, num_warps=4)
    return Tiles(128, 256, 128, num_warps=8, resident=True)


def _k_last(x_RK: Tensor) -> Tensor:
    """x where a descriptor can describe it, else a copy of it, rows padded to whole 16 bytes."""
    R, K = x_RK.shape
    row, step = x_RK.stride()
    pitch = -(-K // _COPY_BYTES) * _COPY_BYTES
    spaced = R == 1 or (row >= K and row % _COPY_BYTES == 0)
    if (step == 1 or K == 1) and spaced and x_RK.data_ptr() % _COPY_BYTES == 0:
        return x_RK if R > 1 and step == 1 else x_RK.as_strided((R, K), (pitch if R == 1 else row, 1))
    out_RK = x_RK.new_empty(R, pitch)[:, :K]
    triton_call(
        x_RK.view(torch.int8), out_RK.view(torch.int8), row, step, out_RK.stride(0), R, K,
        kernel=copy_kernel, grid=(-(-R // 64), -(-K // 128)), TILE_R=64, TILE_K=128, num_warps=4,
    )  # fmt: skip
    return out_RK
