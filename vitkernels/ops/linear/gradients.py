"""Gradients of a linear layer's parameters, as PyTorch operators that torch.compile does not trace into.

Shape suffixes: M rows (tokens), K input features, N output features, G groups of columns, P partial sums over rows.
"""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import interpretable, operator
from vitkernels.bridge.triton import cdiv, triton_call


@operator("weight_gradient(Tensor dy, Tensor x, ScalarType dtype) -> Tensor")
def weight_gradient(dy: Tensor, x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return dyᵀ x in `dtype`, summed in float32 and rounded once: (M, N), (M, K) -> (N, K)."""
    autocasting = torch.is_autocast_enabled(dy.device.type)  # a backward pass may run inside an autocast region
    with torch.autocast(dy.device.type, enabled=False) if autocasting else nullcontext():
        if dtype == dy.dtype:
            return dy.mT @ x
        if dy.is_cuda and dtype == torch.float32:
            return torch.mm(dy.mT, x, out_dtype=dtype)
        return (dy.mT.float() @ x.float()).to(dtype)


@weight_gradient.register_fake
def _(dy, x, dtype):
    return dy.new_empty(dy.shape[1], x.shape[1], dtype=dtype)


@operator("column_sums(Tensor x) -> Tensor")
def column_sums(x: Tensor) -> Tensor:
    """Return float32 sums over rows, bitwise reproducible: (M, N) -> (N), or (M, G, N) -> (G, N)."""
    x = interpretable(x)
    x_MGN = x if x.ndim == 3 else x.unsqueeze(1)
    return sums_over_rows(x_MGN if x.stride(-1) == 1 else x_MGN.contiguous()).view(x.shape[1:])


@column_sums.register_fake
def _(x):
    return x.new_empty(x.shape[1:], dtype=torch.float32)


def sums_over_rows(x_MGN: Tensor) -> Tensor:
    """Return the sums (G, N) of x (M, G, N), whose last stride is 1: one launch for few rows, else by partial sums."""
    M, G, N = x_MGN.shape
    rows, columns = 32, 64
    steps = 16 if M > 2048 else max(1, cdiv(M, rows))
    parts = max(1, cdiv(M, rows * steps))
    sums_PGN = x_MGN.new_empty(parts, G, N, dtype=torch.float32)
    if sums_PGN.numel():
        triton_call(
            x_MGN, sums_PGN, x_MGN.stride(0), x_MGN.stride(1), M, G * N, N, steps,
            kernel=column_sums_kernel, grid=(cdiv(G * N, columns), parts),
            ROWS=rows, COLUMNS=columns,
        )  # fmt: skip
    return sums_over_rows(sums_PGN) if parts > 1 else sums_PGN[0]


@triton.jit(do_not_specialize=["M", "steps"])  # one kernel for all batch sizes
def column_sums_kernel(
    x, sums, stride_row, stride_group, M, columns, N, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Sum ROWS * steps rows of (M, columns); the columns are groups of N, stride_group apart."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    place = column // N * stride_group + column % N
    first = tl.program_id(1) * (ROWS * steps)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = first + step * ROWS + tl.arange(0, ROWS)
        inside = (row < M)[:, None] & (column < columns)[None, :]
        at = row.to(tl.int64)[:, None] * stride_row + place[None, :]
        total += tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(sums + tl.program_id(1).to(tl.int64) * columns + column, tl.sum(total, 0), mask=column < columns)
