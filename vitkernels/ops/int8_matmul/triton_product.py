"""Launch the 8-bit products: choose tiles and grid for the given tensors.

Tiles are fixed choices from measurements on one H200, so no call pays for autotuning.
Shape suffixes: M rows, K the summed dimension, N columns, R rows of either operand.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitkernels.bridge.triton import triton_call
from vitkernels.ops.int8_matmul.triton_kernel import copy_kernel, product_kernel

_ALIGNMENT = 16  # bytes: the start and the row stride of a descriptor are multiples of it


@dataclass(frozen=True)
class ProductTiling:
    """Launch parameters of product_kernel.

    m, n, k: rows, columns and depth of a tile.
    group: rows of tiles whose programs run next to each other (see grouped_tile).
    persistent: one program per multiprocessor loops over tiles; otherwise one program per tile.
    """

    m: int
    n: int
    k: int
    num_warps: int
    num_stages: int = 3
    group: int = 8
    persistent: bool = False


def product(
    x_MK: Tensor,
    w_KN: Tensor,
    out_dtype: torch.dtype,
    x_scale_M: Tensor | None = None,
    w_scale_N: Tensor | None = None,
    tiling: ProductTiling | None = None,
    bias_N: Tensor | None = None,
) -> Tensor:
    """Return x @ w · x_scale[:, None] · w_scale + bias; nothing is checked.

    Args:
        x_MK, w_KN: int8, summed in int32, or fp8, summed in float32. Operands that are not contiguous along K, or whose
            row stride is not a multiple of 16 bytes, are copied first. Activations (M, K) and the transpose of weights
            (N, K) need no copy.
        out_dtype: of the result; int32 allows neither scales nor a bias.
        x_scale_M, w_scale_N: float32, contiguous.
        bias_N: floating point, contiguous.
    """
    M, K = x_MK.shape
    N = w_KN.shape[1]
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    if 0 in (M, N, K):
        return out_MN.zero_() if bias_N is None else out_MN.copy_(bias_N)
    tiling = tiling or choose_tiling(M, N, x_MK.dtype)
    x_MK, w_NK = _contiguous_along_k(x_MK), _contiguous_along_k(w_KN.T)
    programs = -(-M // tiling.m) * -(-N // tiling.n)
    if tiling.persistent and x_MK.is_cuda:
        programs = min(programs, torch.cuda.get_device_properties(x_MK.device).multi_processor_count)
    triton_call(
        TensorDescriptor(x_MK, x_MK.shape, x_MK.stride(), [tiling.m, tiling.k]),
        TensorDescriptor(w_NK, w_NK.shape, w_NK.stride(), [tiling.n, tiling.k]),
        out_MN, x_scale_M, w_scale_N, bias_N, out_MN.stride(0), M, N, K, programs,
        kernel=product_kernel, grid=(programs,),
        TILE_M=tiling.m, TILE_N=tiling.n, TILE_K=tiling.k, GROUP=tiling.group,
        OVERLAP=tiling.persistent and out_dtype.itemsize == 2,  # a tile of 4-byte results does not fit in shared memory
        SUM=tl.int32 if x_MK.dtype == torch.int8 else tl.float32,
        num_warps=tiling.num_warps, num_stages=tiling.num_stages,
    )  # fmt: skip
    return out_MN


def choose_tiling(M: int, N: int, dtype: torch.dtype) -> ProductTiling:
    """Return the fastest tiling measured on an H200 for a product of that size (notes/int8_matmul.md)."""
    if -(-M // 128) * -(-N // 128) <= 66:  # larger tiles would leave half of the multiprocessors idle
        return ProductTiling(64, 64, 256, num_warps=4)
    if dtype == torch.int8 or M * N < 2048 * 2048:
        return ProductTiling(128, 128, 128, num_warps=4)
    return ProductTiling(128, 256, 128, num_warps=8, persistent=True)


def _contiguous_along_k(x_RK: Tensor) -> Tensor:
    """Return x if a descriptor can describe it, else a copy with rows padded to multiples of 16 bytes."""
    R, K = x_RK.shape
    row, step = x_RK.stride()
    pitch = -(-K // _ALIGNMENT) * _ALIGNMENT
    spaced = R == 1 or (row >= K and row % _ALIGNMENT == 0)
    if (step == 1 or K == 1) and spaced and x_RK.data_ptr() % _ALIGNMENT == 0:
        return x_RK if R > 1 and step == 1 else x_RK.as_strided((R, K), (pitch if R == 1 else row, 1))
    out_RK = x_RK.new_empty(R, pitch)[:, :K]
    triton_call(
        x_RK.view(torch.int8), out_RK.view(torch.int8), row, step, out_RK.stride(0), R, K,
        kernel=copy_kernel, grid=(-(-R // 64), -(-K // 128)), TILE_R=64, TILE_K=128, num_warps=4,
    )  # fmt: skip
    return out_RK
