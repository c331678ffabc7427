"""Stream-K 8-bit products: long sums and small results, such as a linear layer's weight gradient.

Such products have fewer tiles than the GPU has multiprocessors. The steps along K of all tiles are therefore divided
evenly among programs, and a second kernel adds the partial sums of each tile in a fixed order (M. Osama et al. 2023,
arXiv 2301.03598).

Shape suffixes: M rows, K the summed dimension, N columns.
"""

import torch
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from vitkernels.bridge.triton import triton_call
from vitkernels.ops.int8_matmul.triton_kernel import add_partials_kernel, partial_sums_kernel

MIN_K = 8192
_TILE = (128, 256, 128)
_ADDED_ROWS = 16  # rows of a tile that one program of the second kernel adds


def takes(x_MK: Tensor, w_NK: Tensor) -> bool:
    """Return whether stream-K suits the product, and descriptors can describe its operands."""
    M, K = x_MK.shape
    rows, columns, _ = _TILE
    describable = all(t.stride(1) == 1 and t.stride(0) % 16 == 0 and t.data_ptr() % 16 == 0 for t in (x_MK, w_NK))
    return K >= MIN_K and -(-M // rows) * -(-w_NK.shape[0] // columns) < programs_on(x_MK.device) and describable


def product(
    x_MK: Tensor, w_NK: Tensor, out_dtype, x_scale_M, w_scale_N, tile=_TILE, programs: int | None = None
) -> Tensor:
    """Return (x · x_scale[:, None]) (w · w_scale[:, None])ᵀ, (M, N); scales are float32, or None for ones."""
    (M, K), N = x_MK.shape, w_NK.shape[0]
    rows, columns, depth = tile
    across, steps = -(-N // columns), -(-K // depth)
    tiles = -(-M // rows) * across
    # At most the steps of one tile, so that a run touches at most two tiles.
    run = min(steps, -(-tiles * steps // (programs or programs_on(x_MK.device))))
    programs = -(-tiles * steps // run)
    sums = torch.int32 if x_MK.dtype == torch.int8 else torch.float32
    partials = x_MK.new_empty(programs, 2, rows, columns, dtype=sums)
    out_MN = x_MK.new_empty(M, N, dtype=out_dtype)
    triton_call(
        TensorDescriptor(x_MK, x_MK.shape, x_MK.stride(), [rows, depth]),
        TensorDescriptor(w_NK, w_NK.shape, w_NK.stride(), [columns, depth]),
        partials, across, steps, run, tiles * steps,
        kernel=partial_sums_kernel, grid=(programs,),
        TILE_M=rows, TILE_N=columns, TILE_K=depth, SUM=tl.int32 if sums == torch.int32 else tl.float32,
        num_warps=8, num_stages=4,
    )  # fmt: skip
    triton_call(
        partials, out_MN, x_scale_M, w_scale_N, M, N, across, steps, run,
        kernel=add_partials_kernel, grid=(tiles, rows // _ADDED_ROWS),
        TILE_M=rows, TILE_N=columns, ROWS=_ADDED_ROWS, num_warps=4,
    )  # fmt: skip
    return out_MN


def programs_on(device: torch.device) -> int:
    """Return the number of multiprocessors; on the CPU, where programs are interpreted, 3."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
