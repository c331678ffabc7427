"""Launch the product of quantized_matmul: choose tiles and grid. Nothing is checked.

Shape suffixes: M rows, K summed dimension, N columns, S blocks of K that share a scale.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.triton import next_power_of_2, triton_call
from vitkernels.ops.quantized_matmul.triton_kernel import product_kernel


@dataclass(frozen=True)
class DequantTiling:
    """Launch parameters of the kernel: m, n, k are rows, columns and depth of a tile, group as in grouped_tile."""

    m: int
    n: int
    k: int
    group: int = 8
    num_warps: int = 8
    num_stages: int = 3


def product(
    x_MK: Tensor,
    w: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    x_scale_M: Tensor | None,
    bias_N: Tensor | None,
    block_size: int,
    out_dtype: torch.dtype,
    tiling: DequantTiling | None = None,
) -> Tensor:
    """Return (x w · scale − Σx · zero_point) · x_scale + bias.

    x_MK: int8 with x_scale_M, or floating point without. w, scale, zero_point, bias_N and block_size: as in the op.
    """
    M, K = x_MK.shape
    N = scale.shape[-1]
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    if not out_MN.numel():
        return out_MN
    blockwise = block_size != -1
    block, strides = (block_size, w.stride()) if blockwise else (K, (0, w.stride(1), w.stride(0)))
    packed = w.dtype == torch.uint8
    unit = -(-block // 2) if packed else block
    tiling = tiling or choose_tiling(M, N, unit, x_MK.dtype)
    steps = -(-unit // tiling.k)
    triton_call(
        x_MK, w, scale, zero_point, x_scale_M, bias_N, out_MN,
        M, N, K, block, unit, steps, steps * (K // block), *strides,
        kernel=product_kernel,
        grid=(-(-M // tiling.m) * -(-N // tiling.n),),
        PACKED=packed, BLOCKWISE=blockwise, RAGGED=unit % tiling.k != 0 or unit * (1 + packed) != block,
        SUM=tl.int32 if x_MK.dtype == torch.int8 else tl.float32,
        TILE_M=tiling.m, TILE_N=tiling.n, TILE_K=tiling.k, GROUP=tiling.group,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out_MN


def choose_tiling(M: int, N: int, unit: int, dtype: torch.dtype) -> DequantTiling:
    """Return the fastest tiling measured on an H200 for a product of that size, at least 32 deep for 8-bit MMA."""
    deepest = {1: 128, 2: 64, 4: 32}[dtype.itemsize]
    k = min(deepest, max(32, next_power_of_2(unit)))
    if dtype == torch.float32 or M * N <= 512 * 512:
        return DequantTiling(64, 64, k, num_warps=4)
    if dtype == torch.int8 and M * N >= 2048 * 2048:
        return DequantTiling(128, 256, k)
    return DequantTiling(128, 128, k, num_warps=4)
