"""Launches of the quantization kernels: from tensors to tiles and grids. Nothing is checked here.

Shape suffixes: M rows (tokens), C columns (channels), P programs.
"""

import torch
import triton
import triton.language as tl

from vitkernels.bridge.triton import triton_call
from vitkernels.ops import rowwise
from vitkernels.ops.rowwise.triton_kernel import column_tops_kernel, columns_kernel, rows_kernel

_DTYPES = {torch.int8: tl.int8, torch.float8_e4m3fn: tl.float8e4nv}


def quantize_rows(x_MC, gradient_MC, dtype, gelu, transposed, sums, rows=None, chunk=None, num_warps=None):
    M, C = x_MC.shape
    M_padded = rowwise.padded(M)
    q = torch.empty_like(x_MC, dtype=dtype)
    scale = x_MC.new_empty(M, dtype=torch.float32)
    rows, chunk, num_warps = (rows, chunk, num_warps) if rows else _tile(C, transposed)
    programs = triton.cdiv(M_padded, rows)
    qt = x_MC.new_empty(C, M_padded, dtype=dtype) if transposed else None
    sums_PC = x_MC.new_empty(programs, C, dtype=torch.float32) if sums else None
    triton_call(
        x_MC, gradient_MC, q.view(torch.int8), scale, None if qt is None else qt.view(torch.int8), sums_PC,
        M, M_padded, C,
        kernel=rows_kernel, grid=(programs,),
        GELU=gelu, LARGEST=rowwise.LARGEST[dtype], DTYPE=_DTYPES[dtype], ROWS=rows, CHUNK=chunk, WHOLE=chunk >= C,
        num_warps=num_warps,
    )  # fmt: skip
    empty = scale.new_empty(0)
    return q, scale, q.new_empty(0, 0) if qt is None else qt, empty if sums_PC is None else sums_PC.sum(0)


def _tile(C: int, transposed: bool) -> tuple[int, int, int]:
    """Rows, columns and warps of a program: the fastest seen on an H200 for rows of that length."""
    whole = triton.next_power_of_2(C)
    if not transposed:
        return (4, whole, 4) if whole <= 4096 else (8, 1024, 8)
    return (32, whole, 16) if whole <= 1024 else (32, 1024, 16)


def quantize_columns(x_MC, factor_M, other_factor_M, dtype, rows=64, columns=64, steps=8, num_warps=4):
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
