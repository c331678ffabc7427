"""Launches of the quantization kernels: from tensors to tiles and grids. Nothing is checked here.

Shape suffixes: M rows (tokens), C columns (channels), P programs.
"""

import torch
import triton
import triton.language as tl

from vitkernels.bridge.triton import triton_call
from vitkernels.quant import rowwise
from vitkernels.quant.rowwise.triton_kernel import column_tops_kernel, columns_kernel, rows_kernel, transpose_kernel

_DTYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}


def quantize_rows(x_MC, gradient_MC, dtype, gelu, transposed, sums):
    M, C = x_MC.shape
    q_MC = torch.empty_like(x_MC, dtype=dtype)
    scale_M = x_MC.new_empty(M, dtype=torch.float32)
    rows, chunk, num_warps = _tile(C)
    triton_call(
        x_MC, gradient_MC, q_MC.view(torch.int8), scale_M, M, C,
        kernel=rows_kernel, grid=(triton.cdiv(M, rows),),
        GELU=gelu, LARGEST=rowwise.LARGEST[dtype], DTYPE=_DTYPES[dtype], ROWS=rows, CHUNK=chunk, WHOLE=chunk >= C,
        num_warps=num_warps,
    )  # fmt: skip
    if transposed:
        return q_MC, scale_M, *_transpose(q_MC, scale_M, sums)
    assert not (gelu and sums), "sums of what is not kept come with the transposed copy"
    sums_C = x_MC.sum(0, dtype=torch.float32) if sums else scale_M.new_empty(0)
    return q_MC, scale_M, q_MC.new_empty(0, 0), sums_C


def _transpose(q_MC, scale_M, sums: bool, rows=64, columns=64):
    """qᵀ (C, padded(M)), and the sums over rows of q · scale (C,): what was rounded, rounding's errors even out."""
    M, C = q_MC.shape
    M_padded = rowwise.padded(M)
    programs = triton.cdiv(M_padded, rows)
    qt_CM = q_MC.new_empty(C, M_padded)
    sums_PC = scale_M.new_empty(programs, C) if sums else None
    triton_call(
        q_MC.view(torch.int8), scale_M, qt_CM.view(torch.int8), sums_PC, M, M_padded, C,
        kernel=transpose_kernel, grid=(programs, triton.cdiv(C, columns)),
        DTYPE=_DTYPES[q_MC.dtype], ROWS=rows, COLUMNS=columns, num_warps=4,
    )  # fmt: skip
    return qt_CM, scale_M.new_empty(0) if sums_PC is None else sums_PC.sum(0)


def _tile(C: int) -> tuple[int, int, int]:
    """Rows, columns and warps of a program: the fastest seen on an H200 for rows of that length."""
    whole = triton.next_power_of_2(C)
    return (4, whole, 4) if whole <= 4096 else (8, 1024, 8)


def quantize_columns(x_MC, factor_M, other_factor_M, dtype, rows=128, columns=64, steps=4, num_warps=4):
    M, C = x_MC.shape
    M_padded = rowwise.padded(M)
    top = x_MC.new_zeros(C, dtype=torch.float32)
    qt, scale = x_MC.new_empty(C, M_padded, dtype=dtype), torch.empty_like(top)
    triton_call(
        x_MC, factor_M, other_factor_M, top, M, C, steps,
        kernel=column_tops_kernel, grid=(triton.cdiv(M, rows * steps), triton.cdiv(C, columns)),
        ROWS=rows, COLUMNS=columns, num_warps=num_warps,
    )  # fmt: skip
    triton_call(
        x_MC, factor_M, other_factor_M, top, qt.view(torch.int8), scale, M, M_padded, C,
        kernel=columns_kernel, grid=(triton.cdiv(M_padded, rows), triton.cdiv(C, columns)),
        LARGEST=rowwise.LARGEST[dtype], DTYPE=_DTYPES[dtype], ROWS=rows, COLUMNS=columns, num_warps=num_warps,
    )  # fmt: skip
    return qt, scale
