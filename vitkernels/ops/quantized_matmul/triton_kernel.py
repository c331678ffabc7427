"""The Triton kernel of quantized_matmul: one product that unpacks weights and scales sums.

Shape suffixes: M rows of x, K summed dimension, N columns of the result.
"""

import triton
import triton.language as tl

from vitkernels.ops.int8_matmul.triton_kernel import grouped_tile


@triton.jit
def _dot(x, w, acc, SUM: tl.constexpr):
    """Return x w + acc; x's dtype represents weights of 8 or fewer bits exactly."""
    return tl.dot(x, w.to(x.dtype), acc, input_precision="ieee", out_dtype=SUM)


@triton.jit
def _columns(ptr, n, in_n):
    """Return the vector's entries n as a float32 row, zero out of bounds."""
    return tl.load(ptr + n, mask=in_n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store(total, x_scale_ptr, bias_ptr, out_ptr, m, n, in_m, in_n, N):
    """Scale rows, add the bias, and store the tile."""
    if x_scale_ptr is not None:
        total *= tl.load(x_scale_ptr + m, mask=in_m, other=0.0)[:, None]
    if bias_ptr is not None:
        total += _columns(bias_ptr, n, in_n)
    at = out_ptr + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit
def product_kernel(
    x_ptr, w_ptr, scale_ptr, zero_ptr, x_scale_ptr, bias_ptr, out_ptr,
    M, N, K, BLOCK, UNIT, STEPS, TOTAL, w_stride_block, w_stride_k, w_stride_n,
    PACKED: tl.constexpr, BLOCKWISE: tl.constexpr, RAGGED: tl.constexpr, SUM: tl.constexpr,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute one tile of out (M, N) = (x w · scale − Σx · zero) · x_scale + bias.

    BLOCK: inputs that share a scale. UNIT: stored rows of a block, BLOCK, or half of it if PACKED: the low nibble of
    byte j is row j of the block, the high one row UNIT + j. STEPS: tiles per unit along K. TOTAL: tiles along K.
    RAGGED: the last tile of a unit is not full.
    """
    tile_m, tile_n = grouped_tile(tl.program_id(0), M, N, TILE_M, TILE_N, GROUP)
    m = tile_m * TILE_M + tl.arange(0, TILE_M)
    n = tile_n * TILE_N + tl.arange(0, TILE_N)
    in_m, in_n = m < M, n < N
    # Rows and columns out of bounds wrap around, so loads need no mask; their results are not stored.
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
            nibbles = w.to(tl.int8, bitcast=True)
            acc = _dot(x, (nibbles << 4) >> 4, acc, SUM)
            if RAGGED:
                x = tl.load(x_at + UNIT, mask=(j[None, :] < UNIT) & (j[None, :] + UNIT < BLOCK), other=0.0)
            else:
                x = tl.load(x_at + UNIT)
            summand += x.to(tl.float32)
            acc = _dot(x, nibbles >> 4, acc, SUM)
        else:
            acc = _dot(x, w, acc, SUM)
        if zero_ptr is not None:
            x_sum += tl.sum(summand, axis=1)  # one sum per step: Triton 3.6 fails to compile two
        if BLOCKWISE:
            total += acc.to(tl.float32) * _columns(scale_ptr + block * N, n, in_n)
            if zero_ptr is not None:
                total -= x_sum[:, None] * _columns(zero_ptr + block * N, n, in_n)
    if not BLOCKWISE:
        total = acc.to(tl.float32) * _columns(scale_ptr, n, in_n)
        if zero_ptr is not None:
            total -= x_sum[:, None] * _columns(zero_ptr, n, in_n)
    _store(total, x_scale_ptr, bias_ptr, out_ptr, m, n, in_m, in_n, N)
