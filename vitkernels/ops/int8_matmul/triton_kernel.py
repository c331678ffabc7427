"""Triton kernels of 8-bit products: x w with 32-bit sums, and optional scales of rows and columns.

No kernel is specialized on what depends on the batch size: M, or K of a weight gradient. One kernel serves all.

Shape suffixes: M rows, K the summed dimension, N columns.
"""

import triton
import triton.language as tl


@triton.jit
def grouped_tile(program, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """Return the row and column of a program's tile.

    Programs advance down the columns of GROUP rows of tiles, so that neighbors share operands in the cache.
    """
    rows, columns = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = program // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit(do_not_specialize=["M", "programs"])
def product_kernel(
    x_MK, w_NK, out_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, out_stride_m, M, N, K, programs,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute tiles of out (M, N), row-major; x and w are descriptors, which read zeros out of bounds.

    OVERLAP: load the next tile while this one is stored. SUM: the dtype of the sums.
    """
    tiles = tl.cdiv(M, TILE_M) * tl.cdiv(N, TILE_N)
    for tile in tl.range(tl.program_id(0), tiles, programs, flatten=OVERLAP):
        tile_m, tile_n = grouped_tile(tile, M, N, TILE_M, TILE_N, GROUP)
        acc = tl.zeros([TILE_M, TILE_N], SUM)
        for k in range(0, K, TILE_K):
            x, w = x_MK.load([tile_m * TILE_M, k]), w_NK.load([tile_n * TILE_N, k])
            acc = tl.dot(x, w.T, acc, out_dtype=SUM)
        m = tile_m * TILE_M + tl.arange(0, TILE_M)
        n = tile_n * TILE_N + tl.arange(0, TILE_N)
        if x_scale_ptr is not None:
            acc = acc.to(tl.float32) * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
        if w_scale_ptr is not None:
            acc = acc.to(tl.float32) * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
        if bias_ptr is not None:
            acc = acc.to(tl.float32) + tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
        at = out_ptr + m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
        tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))


@triton.jit
def copy_kernel(x_ptr, out_ptr, x_stride_r, x_stride_k, out_stride_r, R, K, TILE_R: tl.constexpr, TILE_K: tl.constexpr):
    """Copy a matrix (R, K) with any strides to one that is contiguous along K."""
    r = (tl.program_id(0) * TILE_R + tl.arange(0, TILE_R)).to(tl.int64)
    k = (tl.program_id(1) * TILE_K + tl.arange(0, TILE_K)).to(tl.int64)
    inside = (r[:, None] < R) & (k[None, :] < K)
    x = tl.load(x_ptr + r[:, None] * x_stride_r + k[None, :] * x_stride_k, mask=inside)
    tl.store(out_ptr + r[:, None] * out_stride_r + k[None, :], x, mask=inside)


@triton.jit(do_not_specialize=["STEPS", "RUN", "TOTAL"])
def partial_sums_kernel(
    x_MK, w_NK, partials_ptr, ACROSS, STEPS, RUN, TOTAL,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Compute RUN of the TOTAL steps along K, which end in the tile where they start or in the next one.

    The partial sums of both tiles go to partials (programs, 2, tile). ACROSS: tiles per row of tiles. STEPS: steps per
    tile.
    """
    program = tl.program_id(0)
    start = program * RUN
    end = min(start + RUN, TOTAL)
    for index in range(2):
        if start < end:
            tile = start // STEPS
            first = start - tile * STEPS
            last = min(STEPS, first + end - start)
            acc = tl.zeros([TILE_M, TILE_N], SUM)
            for step in range(first, last):
                x = x_MK.load([tile // ACROSS * TILE_M, step * TILE_K])
                w = w_NK.load([tile % ACROSS * TILE_N, step * TILE_K])
                acc = tl.dot(x, w.T, acc, out_dtype=SUM)
            at = tl.arange(0, TILE_M)[:, None] * TILE_N + tl.arange(0, TILE_N)[None, :]
            tl.store(partials_ptr + (program * 2 + index).to(tl.int64) * (TILE_M * TILE_N) + at, acc)
            start += last - first


@triton.jit(do_not_specialize=["STEPS", "RUN"])
def add_partials_kernel(
    partials_ptr, out_ptr, x_scale_ptr, w_scale_ptr, M, N, ACROSS, STEPS, RUN,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of a tile of out (M, N): its partial sums, added in a fixed order, times the scales."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, TILE_N)
    total = tl.zeros([ROWS, TILE_N], partials_ptr.dtype.element_ty)
    for program in range(tile * STEPS // RUN, (tile * STEPS + STEPS - 1) // RUN + 1):
        partial = program * 2 + (program * RUN // STEPS != tile).to(tl.int32)
        at = partial.to(tl.int64) * (TILE_M * TILE_N) + row[:, None] * TILE_N + column[None, :]
        total += tl.load(partials_ptr + at)
    m, n = tile // ACROSS * TILE_M + row, tile % ACROSS * TILE_N + column
    out = total.to(tl.float32)
    if x_scale_ptr is not None:
        out *= tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    if w_scale_ptr is not None:
        out *= tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(
        out_ptr + m[:, None] * N + n[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=(m[:, None] < M) & (n[None, :] < N),
    )
