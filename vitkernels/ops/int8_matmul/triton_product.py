"""Launches the 8-bit products: from tensors to tiles and a grid.

Tiles are chosen here once and for all, from measurements on one H200: the first call searches nothing.
Shape suffixes: M rows, K the summed dimension, N columns.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.triton import triton_call
from vitkernels.ops.int8_matmul.triton_kernel import product_kernel


@dataclass(frozen=True)
class Tiles:
    """Rows, columns and depth of a tile; tile rows that share operands; warps per program; loads under way."""

    m: int
    n: int
    k: int
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


def product(
    x_MK: Tensor,
    w_KN: Tensor,
    out_dtype: torch.dtype,
    x_scale_M: Tensor | None = None,
    w_scale_N: Tensor | None = None,
    tiles: Tiles | None = None,
) -> Tensor:
    """x @ w · x_scale[:, None] · w_scale[None, :] in out_dtype: int8 operands (int32 sums) or fp8 ones (float32 sums).

    Operands of any strides; fastest where both lie in memory with K last, as activations and (N, K) weights do.
    Scales: float32, contiguous; with an int32 out_dtype there are none. Nothing is checked here.
    """
    M, K = x_MK.shape
    N = w_KN.shape[1]
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    if not out_MN.numel():
        return out_MN
    tiles = tiles or choose_tiles(M, N, K)
    triton_call(
        x_MK, w_KN, out_MN, x_scale_M, w_scale_N,
        *x_MK.stride(), *w_KN.stride(), out_MN.stride(0), M, N, K,
        kernel=product_kernel,
        grid=(-(-M // tiles.m) * -(-N // tiles.n),),
        TILE_M=tiles.m, TILE_N=tiles.n, TILE_K=tiles.k, GROUP=tiles.group,
        RAGGED=K % tiles.k != 0, SUM=tl.int32 if x_MK.dtype == torch.int8 else tl.float32,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out_MN


def choose_tiles(M: int, N: int, K: int) -> Tiles:
    """The fastest seen on an H200 for a product of that size."""
    if M * N >= 2048 * 2048:
        return Tiles(128, 256, 128)
    return Tiles(128, 128, 128, num_warps=4) if M * N > 512 * 512 else Tiles(64, 64, 128, num_warps=4)
