"""The device code of quantized_matmul: one product, its weights unpacked and its sums scaled on the way.

Shape suffixes: M rows of x, K summed dimension, N columns of the result.
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
def _dot(x, w, acc, SUM: tl.constexpr):
    """x w + acc; weights of few bits are exact in x's dtype."""
    return tl.dot(x, w.to(x.dtype), acc, input_precision="ieee", out_dtype=SUM)


@triton.jit
def product_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, x_scale_ptr, bias_ptr, out_ptr,
    M, N, K, BLOCK, UNIT, STEPS, TOTAL, w_stride_block, w_stride_k, w_stride_n,
    PACKED: tl.constexpr, BLOCKWISE: tl.constexpr, RAGGED: tl.constexpr, SUM: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """One tile of out (M, N) = (x w · scale − Σx · zero) · x_scale + bias.

    BLOCK: inputs that share a scale. UNIT: its stored rows, BLOCK or (PACKED) the half of it: a byte's low digit is row
    j of the block, the high one row UNIT + j. STEPS: tiles to a unit. TOTAL: tiles in all. RAGGED: the last of a unit
    is not full.
    """
    tile_m, tile_n = _tile_of(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    m = tile_m * TILE_M + tl.arange(0, TILE_M)
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    in_m, in_n = m < M, n < N
    # Past the edge rows and columns come round again: loads need no mask, and what they give is not stored.
    x_row = x_ptr + (m % M).to(tl.int64)[:, None] * K
    w_column = w_ptr + (n % N).to(tl.int64)[None, :] * w_stride_n
    acc = tl.zeros([TILE_M, TILE_N], SUM)
    total = tl.zeros([TILE_M, TILE_N], tl.float32)
    x_sum = tl.zeros([TILE_M], tl.float32)
    for step in range(TOTAL):
        block = step // STEPS
        j = (step % STEPS) * TILE_K + tl.arange(0, TILE_K)
        w_at = w_column + block.to(tl.int64) * w_stride_block + j[:, None] * w_stride_k
        x_at = x_row + block * BLOCK + j[None, :]
        if RAGGED:
            w = tl.load(w_at, mask=j[:, None] < UNIT, other=0)
            x = tl.load(x_at, mask=j[None, :] < UNIT, other=0.0)
        else:
            w, x = tl.load(w_at), tl.load(x_at)
        if BLOCKWISE:
            acc = tl.zeros([TILE_M, TILE_N], SUM)
            x_sum = tl.zeros([TILE_M], tl.float32)
        summand = x.to(tl.float32)
        if PACKED:
            digits = w.to(tl.int8, bitcast=True)
            acc = _dot(x, (digits << 4) >> 4, acc, SUM)
            if RAGGED:
                x = tl.load(x_at + UNIT, mask=(j[None, :] < UNIT) & (j[None, :] + UNIT < BLOCK), other=0.0)
            else:
                x = tl.load(x_at + UNIT)
            summand += x.to(tl.float32)
            acc = _dot(x, digits >> 4, acc, SUM)
        else:
            acc = _dot(x, w, acc, SUM)
        if zero_ptr is not None:
            x_sum += tl.sum(summand, axis=1)  # one sum a step: Triton 3.6 fails to compile two
        if BLOCKWISE:
            total += (
                acc.to(tl.float32) * tl.load(scale_ptr + block * N + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
            )
            if zero_ptr is not None:
                zero = tl.load(zero_ptr + block * N + n, mask=in_n, other=0.0).to(tl.float32)
                total -= x_sum[:, None] * zero[None, :]
    if not BLOCKWISE:
        total = acc.to(tl.float32) * tl.load(scale_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
        if zero_ptr is not None:
            total -= x_sum[:, None] * tl.load(zero_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    if x_scale_ptr is not None:
        total *= tl.load(x_scale_ptr + m, mask=in_m, other=0.0)[:, None]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])
