"""Launch the quantization kernels: choose tiles and grids. Nothing is checked.

Tiles are the fastest measured on an H200 (notes/quant.md). Shape suffixes: M rows (tokens), C columns (channels).
"""

import torch
import triton.language as tl

from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.ops.eight_bit_format import LARGEST, padded
from vitkernels.ops.rowwise_quantization.triton_kernel import (
    column_tops_kernel,
    columns_kernel,
    rows_kernel,
    transpose_kernel,
)

_DTYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}
_PROGRAMS = 528  # four per multiprocessor of an H200


def quantize_rows(x_MC, gradient_MC, dtype, gelu):
    """Return q (M, C) and its scales (M,), of x, of gelu(x), or of gradient · gelu'(x)."""
    M, C = x_MC.shape
    q_MC = torch.empty_like(x_MC, dtype=dtype)
    scale_M = x_MC.new_empty(M, dtype=torch.float32)
    if not q_MC.numel():
        return q_MC, scale_M.fill_(1)
    first = 1 << (C.bit_length() - 1)
    second = 0 if first == C else next_power_of_2(C - first)
    rows = max(1, min(16, 2048 // first))
    triton_call(
        x_MC, gradient_MC, _bits(q_MC), scale_M, M, C,
        kernel=rows_kernel, grid=(cdiv(M, rows),),
        GELU=gelu, LARGEST=LARGEST[dtype], DTYPE=_DTYPES[dtype], ROWS=rows, FIRST=first, SECOND=second,
        num_warps=min(32, max(4, first // 1024)),
    )  # fmt: skip
    return q_MC, scale_M


def transpose_rows(q_MC, scale_M, sums: bool):
    """Return qᵀ (C, padded(M)) and the sums (C,) of q · scale over rows, empty unless `sums`."""
    rows = columns = 128
    M, C = q_MC.shape
    M_padded = padded(M)
    programs = cdiv(M_padded, rows)
    qt_CM = q_MC.new_empty(C, M_padded)
    sums_PC = scale_M.new_empty(programs, C) if sums else None
    if qt_CM.numel():
        triton_call(
            _bits(q_MC), scale_M, _bits(qt_CM), sums_PC, M, M_padded, C,
            kernel=transpose_kernel, grid=(programs, cdiv(C, columns)),
            DTYPE=_DTYPES[q_MC.dtype], ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return qt_CM, scale_M.new_empty(0) if sums_PC is None else sums_PC.sum(0)


def quantize_columns(x_MC, factor_M, other_factor_M, dtype, sums: bool):
    """Return qᵀ (C, padded(M)), its scales (C,) and the sums (C,) of x · factor over rows, empty unless `sums`."""
    rows, columns = 64, 128
    M, C = x_MC.shape
    M_padded = padded(M)
    kind = _DTYPES.get(x_MC.dtype)
    x_MC = x_MC if kind is None else _bits(x_MC)
    tiles = cdiv(M, rows)
    steps = max(1, min(8, tiles * cdiv(C, columns) // _PROGRAMS))
    programs = cdiv(tiles, steps)
    top_C = x_MC.new_zeros(C, dtype=torch.float32)
    sums_PC = torch.empty(programs, C, device=x_MC.device) if sums else None
    qt_CM, scale_C = x_MC.new_empty(C, M_padded, dtype=dtype), torch.empty_like(top_C)
    if qt_CM.numel():
        triton_call(
            x_MC, factor_M, other_factor_M, top_C, sums_PC, M, C, steps,
            kernel=column_tops_kernel, grid=(programs, cdiv(C, columns)),
            KIND=kind, ROWS=rows, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
        triton_call(
            x_MC, factor_M, other_factor_M, top_C, _bits(qt_CM), scale_C, M, M_padded, C,
            kernel=columns_kernel, grid=(cdiv(M_padded, 128), cdiv(C, columns)),
            KIND=kind, LARGEST=LARGEST[dtype], DTYPE=_DTYPES[dtype], ROWS=128, COLUMNS=columns, num_warps=4,
        )  # fmt: skip
    return qt_CM, scale_C, scale_C.new_empty(0) if sums_PC is None else sums_PC.sum(0)


def _bits(q: torch.Tensor) -> torch.Tensor:
    return q.view(torch.int8)
