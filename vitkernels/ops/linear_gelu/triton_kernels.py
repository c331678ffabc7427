"""Triton kernels for GELU and its gradient, in the epilogue of a matrix product and as elementwise passes.

Shape suffixes: M rows (tokens), K columns of the left factor, N columns of the product.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # exp2 is one instruction


@triton.jit
def gelu_and_slope(x, TANH: tl.constexpr):
    """Return gelu(x) and gelu'(x) in float32, from two special-function instructions and about twelve others.

    The exact form is x Φ(x), with Φ(-|x|) by Abramowitz and Stegun 7.1.26 (error at most 0.75e-7), whose exp(-x²/2)
    also gives Φ'. Reciprocals are squared reciprocal square roots, one instruction each; a division takes nine.
    """
    if TANH:
        # (1 + tanh u) / 2 = 1 / (1 + exp(-2u)), u = sqrt(2/π) (x + 0.044715 x³)
        square = x * x
        exponent = x * (-2.302208198144325 - 0.1029432396 * square)  # -2 log2(e) u
        root = tl.rsqrt(1.0 + tl.exp2(tl.minimum(exponent, 126.0)))
        cdf = root * root
        slope = cdf + x * cdf * (1.0 - cdf) * (1.5957691216057308 + 0.2140644488 * square)
    else:
        bell = tl.exp2((-0.5 * LOG2E) * x * x)
        root = tl.rsqrt(1.0 + 0.23164190 * tl.abs(x))  # 0.3275911 / sqrt(2)
        t = root * root
        tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        tail *= t * bell
        cdf = tl.where(x < 0, tail, 1.0 - tail)
        slope = cdf + x * bell * 0.3989422804014327  # 1 / sqrt(2π)
    return x * cdf, slope


# --- in the product's epilogue ----------------------------------------------------------------------------------------


@triton.jit
def _product(a, b, m, n, K, TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
             B_IS_NK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Return the tile of a b (or a bᵀ) that starts at (m, n), in float32. Descriptors read zeros out of bounds."""
    acc = tl.zeros([TILE_M, TILE_N], tl.float32)
    for k in range(0, K, TILE_K):
        if B_IS_NK:
            acc = tl.dot(a.load([m, k]), b.load([n, k]).T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(a.load([m, k]), b.load([k, n]), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile's columns in two."""
    return tl.split(tl.permute(tl.reshape(x, [ROWS, 2, COLUMNS // 2]), [0, 2, 1]))


@triton.jit
def _quarters(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Split a tile's columns in four: an epilogue over the entire tile at once spills registers."""
    left, right = _halves(x, ROWS, COLUMNS)
    first, second = _halves(left, ROWS, COLUMNS // 2)
    third, fourth = _halves(right, ROWS, COLUMNS // 2)
    return first, second, third, fourth


@triton.jit
def _activate(
    acc, bias_N, saved_MN, act_MN, m, n, N, COLUMNS: tl.constexpr, TANH: tl.constexpr, KEEP: tl.constexpr
):  # fmt: skip
    """Store GELU's results for COLUMNS columns of a tile of the product."""
    columns = n + tl.arange(0, COLUMNS)
    pre = acc + tl.load(bias_N + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    pre = pre.to(act_MN.dtype)
    act, slope = gelu_and_slope(pre.to(tl.float32), TANH)
    act_MN.store([m, n], act.to(act_MN.dtype))
    saved_MN.store([m, n], slope.to(saved_MN.dtype) if KEEP else pre)


@triton.jit
def linear_gelu_kernel(
    bias_N, x_MK, weight_NK, saved_MN, act_MN, M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    TANH: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store gelu(x weightᵀ + bias) and the pre-activation, or with KEEP GELU's slope there.

    Matrices are passed as descriptors.
    """
    tiles_n = tl.cdiv(N, TILE_N)
    tile = tl.program_id(0)
    m, n = tile // tiles_n * TILE_M, tile % tiles_n * TILE_N  # x is read from memory once per row of tiles
    acc = _product(x_MK, weight_NK, m, n, K, TILE_M, TILE_N, TILE_K, True, PRECISION)
    quarter: tl.constexpr = TILE_N // 4
    first, second, third, fourth = _quarters(acc, TILE_M, TILE_N)
    _activate(first, bias_N, saved_MN, act_MN, m, n, N, quarter, TANH, KEEP)
    _activate(second, bias_N, saved_MN, act_MN, m, n + quarter, N, quarter, TANH, KEEP)
    _activate(third, bias_N, saved_MN, act_MN, m, n + 2 * quarter, N, quarter, TANH, KEEP)
    _activate(fourth, bias_N, saved_MN, act_MN, m, n + 3 * quarter, N, quarter, TANH, KEEP)


@triton.jit
def _deactivate(
    dact, saved_MN, dpre_MN, act_MN, sums_TN, m, n, tile_m, N,
    COLUMNS: tl.constexpr, TANH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Store GELU's gradients for COLUMNS columns of a tile of dact."""
    slope = saved_MN.load([m, n]).to(tl.float32)
    if not KEEP:
        act, slope = gelu_and_slope(slope, TANH)
        act_MN.store([m, n], act.to(act_MN.dtype))
    dpre = dact * slope
    dpre_MN.store([m, n], dpre.to(dpre_MN.dtype))
    columns = n + tl.arange(0, COLUMNS)
    # Rows beyond M have dact = 0 and do not contribute.
    tl.store(sums_TN + tile_m.to(tl.int64) * N + columns, tl.sum(dpre, 0), mask=columns < N)


@triton.jit
def gelu_linear_backward_kernel(
    sums_TN, dy_MK, weight_KN, saved_MN, dpre_MN, act_MN, M, N, K,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
    TANH: tl.constexpr, KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store dpre = (dy weight) gelu'(pre), its sums over each tile's rows, and gelu(pre).

    With KEEP, saved_MN is gelu'(pre), and gelu(pre) is not stored.
    """
    tiles_n = tl.cdiv(N, TILE_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    m, n = tile_m * TILE_M, tile_n * TILE_N
    acc = _product(dy_MK, weight_KN, m, n, K, TILE_M, TILE_N, TILE_K, False, PRECISION)
    quarter: tl.constexpr = TILE_N // 4
    first, second, third, fourth = _quarters(acc, TILE_M, TILE_N)
    _deactivate(first, saved_MN, dpre_MN, act_MN, sums_TN, m, n, tile_m, N, quarter, TANH, KEEP)
    _deactivate(second, saved_MN, dpre_MN, act_MN, sums_TN, m, n + quarter, tile_m, N, quarter, TANH, KEEP)
    _deactivate(third, saved_MN, dpre_MN, act_MN, sums_TN, m, n + 2 * quarter, tile_m, N, quarter, TANH, KEEP)
    _deactivate(fourth, saved_MN, dpre_MN, act_MN, sums_TN, m, n + 3 * quarter, tile_m, N, quarter, TANH, KEEP)


# --- as elementwise passes --------------------------------------------------------------------------------------------


@triton.jit
def gelu_kernel(pre, act, slopes, size, BLOCK: tl.constexpr, TANH: tl.constexpr):
    """Store gelu(pre), and gelu'(pre) if `slopes` is given, which may be `pre`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(pre + at, mask=at < size, other=0.0).to(tl.float32)
    value, slope = gelu_and_slope(x, TANH)
    tl.store(act + at, value, mask=at < size)
    if slopes is not None:
        tl.store(slopes + at, slope, mask=at < size)


@triton.jit
def gelu_backward_kernel(
    dact_MN, saved_MN, dpre_MN, act_MN, sums_PN, M, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEPS: tl.constexpr, TANH: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Store dpre = dact gelu'(pre), its sums over ROWS * STEPS rows, and gelu(pre) if act_MN is given.

    With KEEP, saved_MN is gelu'(pre).
    """
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * (ROWS * STEPS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(STEPS):
        rows = first + step * ROWS + tl.arange(0, ROWS)
        inside = (rows < M)[:, None] & (columns < N)[None, :]
        at = rows.to(tl.int64)[:, None] * N + columns[None, :]
        slope = tl.load(saved_MN + at, mask=inside, other=0.0).to(tl.float32)
        if not KEEP:
            act, slope = gelu_and_slope(slope, TANH)
            if act_MN is not None:
                tl.store(act_MN + at, act, mask=inside)
        dpre = tl.load(dact_MN + at, mask=inside, other=0.0).to(tl.float32) * slope
        tl.store(dpre_MN + at, dpre, mask=inside)
        total += dpre
    tl.store(sums_PN + tl.program_id(1).to(tl.int64) * N + columns, tl.sum(total, 0), mask=columns < N)
