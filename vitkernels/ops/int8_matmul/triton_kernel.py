"""The device code of 8-bit products: x w with wide sums, and scales of rows and columns where they are given.

Shape suffixes: M rows, K the summed dimension, N columns.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of(program, M, N, TILE_M: tl.constexpr, TILE_N: tl.constexpr, GROUP: tl.constexpr):
    """A program's row and column of tiles: GROUP rows at a time, so that neighbours share operands in the cache."""
    rows, columns = tl.cdiv(M, TILE_M), tl.cdiv(N, TILE_N)
    group = program // (GROUP * columns)
    height = min(rows - group * GROUP, GROUP)
    within = program % (GROUP * columns)
    return group * GROUP + within % height, within // height


@triton.jit
def product_kernel(
    x_ptr, w_ptr, out_ptr, x_scale_ptr, w_scale_ptr,
    x_stride_m, x_stride_k, w_stride_k, w_stride_n, out_stride_m, M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
    RAGGED: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """One tile of out (M, N), row-major. RAGGED: K is no multiple of TILE_K. SUM: the dtype of the sums."""
    tile_m, tile_n = _tile_of(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    m = tile_m * TILE_M + tl.arange(0, TILE_M)
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    k = tl.arange(0, TILE_K)
    # Past the edge rows and columns come round again: loads need no mask, and what they give is not stored.
    x_at = x_ptr + (m % M).to(tl.int64)[:, None] * x_stride_m + k[None, :] * x_stride_k
    w_at = w_ptr + k[:, None] * w_stride_k + (n % N).to(tl.int64)[None, :] * w_stride_n
    acc = tl.zeros([TILE_M, TILE_N], SUM)
    for first in range(0, K, TILE_K):
        if RAGGED:
            x = tl.load(x_at, mask=k[None, :] < K - first, other=0.0)
            w = tl.load(w_at, mask=k[:, None] < K - first, other=0.0)
        else:
            x, w = tl.load(x_at), tl.load(w_at)
        acc = tl.dot(x, w, acc, out_dtype=SUM)
        x_at += TILE_K * x_stride_k
        w_at += TILE_K * w_stride_k
    _store(acc, out_ptr, x_scale_ptr, w_scale_ptr, m, n, out_stride_m, M, N)


@triton.jit
def _store(acc, out_ptr, x_scale_ptr, w_scale_ptr, m, n, out_stride_m, M, N):
    if x_scale_ptr is not None:
        acc = acc.to(tl.float32) * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    if w_scale_ptr is not None:
        acc = acc.to(tl.float32) * tl.load(w_scale_ptr + n, mask=n < N, other=0.0)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * out_stride_m + n[None, :]
    tl.store(at, acc.to(out_ptr.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))
