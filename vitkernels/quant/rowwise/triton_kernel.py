"""The device code of 8-bit quantization: scales along rows and columns, and the transposed copies that 8-bit tensor
cores want (Hopper multiplies 8-bit operands only where both lie in memory with the summed dimension last).

What is stored is bits: q and qt are int8 pointers whatever the dtype, for a copy needs to know of none.

Shape suffixes: M rows (tokens), C columns (channels).
"""

import triton
import triton.language as tl

# Below this a row's largest value counts as this: its reciprocal must stay finite.
LEAST = tl.constexpr(1e-30)


@triton.jit
def _quantized(scaled, LARGEST: tl.constexpr, DTYPE: tl.constexpr):
    """The bits, as int8, of values within ±LARGEST rounded to DTYPE, halves to even."""
    if DTYPE == tl.int8:  # noqa: SIM300
        scaled = (scaled + 12582912.0) - 12582912.0  # 1.5 · 2²³: what is left of the sum's digits are whole numbers
    return tl.clamp(scaled, -LARGEST, LARGEST).to(DTYPE).to(tl.int8, bitcast=True)


@triton.jit
def _below(x, density):
    """The normal distribution function, given exp(−x²/2): within 1e-7 (Abramowitz and Stegun 1964, 7.1.26).

    One exponential serves it and the density; the library's erf alone takes more instructions than all else here.
    """
    t = 1.0 / (1.0 + 0.23164189 * tl.abs(x))
    tail = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return tl.where(x > 0, 1.0 - density * tail, density * tail)


@triton.jit
def _value(x_ptr, gradient_ptr, at, mask, GELU: tl.constexpr):
    """x; with GELU: gelu(x), or with a gradient too: gradient · gelu'(x)."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        density = tl.exp(-0.5 * x * x)
        below = _below(x, density)
        if gradient_ptr is None:
            x = x * below
        else:
            slope = below + 0.3989422804014327 * x * density
            x = slope * tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def rows_kernel(
    x_ptr, gradient_ptr, q_ptr, scale_ptr, M, C,
    GELU: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, CHUNK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """ROWS rows of q (M, C) and their scales. WHOLE: a row fits into CHUNK and is read once, otherwise twice."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    top = tl.zeros([ROWS], tl.float32) + LEAST
    for start in range(0, C, CHUNK):
        c = start + tl.arange(0, CHUNK)
        mask = (m[:, None] < M) & (c[None, :] < C)
        value = _value(x_ptr, gradient_ptr, m[:, None] * C + c[None, :], mask, GELU)
        top = tl.maximum(top, tl.max(tl.abs(value), axis=1))
        if WHOLE:
            q = _quantized(value * tl.div_rn(LARGEST, top)[:, None], LARGEST, DTYPE)
            tl.store(q_ptr + m[:, None] * C + c[None, :], q, mask=mask)
    tl.store(scale_ptr + m, tl.div_rn(top, LARGEST), mask=m < M)
    if not WHOLE:
        for start in range(0, C, CHUNK):
            c = start + tl.arange(0, CHUNK)
            mask = (m[:, None] < M) & (c[None, :] < C)
            value = _value(x_ptr, gradient_ptr, m[:, None] * C + c[None, :], mask, GELU)
            q = _quantized(value * tl.div_rn(LARGEST, top)[:, None], LARGEST, DTYPE)
            tl.store(q_ptr + m[:, None] * C + c[None, :], q, mask=mask)


@triton.jit
def transpose_kernel(
    q_ptr, scale_ptr, qt_ptr, sums_ptr, M, M_PADDED, C,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of qt (C, M_PADDED), zeros past M, and the sums over its rows of q · scale into sums (programs, C)."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    q = tl.load(q_ptr + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0)
    at = c.to(tl.int64)[:, None] * M_PADDED + m[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(c[:, None] < C) & (m[None, :] < M_PADDED))
    if sums_ptr is not None:
        value = q.to(DTYPE, bitcast=True).to(tl.float32) * tl.load(scale_ptr + m, mask=m < M, other=0.0)[:, None]
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(value, axis=0), mask=c < C)


@triton.jit
def _factored(x_ptr, factor_ptr, other_factor_ptr, m, c, M, C):
    x = tl.load(x_ptr + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0.0)
    x = x.to(tl.float32)
    if factor_ptr is not None:
        x *= tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
    if other_factor_ptr is not None:
        x *= tl.load(other_factor_ptr + m, mask=m < M, other=0.0)[:, None]
    return x


@triton.jit
def column_tops_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, M, C, STEPS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """The largest |x · factors| of each column into top (C), which is zero before: a maximum knows no order."""
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.zeros([COLUMNS], tl.float32)
    for step in range(STEPS):
        m = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        top = tl.maximum(top, tl.max(tl.abs(_factored(x_ptr, factor_ptr, other_factor_ptr, m, c, M, C)), axis=0))
    tl.atomic_max(top_ptr + c, top, mask=c < C)


@triton.jit
def columns_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, qt_ptr, scale_ptr, M, M_PADDED, C,
    LARGEST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of qt (C, M_PADDED): x · factors over its column's scale."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.maximum(tl.load(top_ptr + c, mask=c < C, other=0.0), LEAST)
    x = _factored(x_ptr, factor_ptr, other_factor_ptr, m, c, M, C)
    q = _quantized(x * tl.div_rn(LARGEST, top)[None, :], LARGEST, DTYPE)
    at = c.to(tl.int64)[:, None] * M_PADDED + m[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(c[:, None] < C) & (m[None, :] < M_PADDED))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + c, tl.div_rn(top, LARGEST), mask=c < C)
