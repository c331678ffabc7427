"""The device code of 8-bit quantization: scales along rows and columns, and the transposed copies that 8-bit tensor
cores want (Hopper multiplies 8-bit operands only where both lie in memory with the summed dimension last).

What is stored is bits: q and qt are int8 pointers whatever the dtype, for a copy needs to know of none.

Shape suffixes: M rows (tokens), C columns (channels).
"""

import triton
import triton.language as tl

from vitkernels.ops.linear_gelu.triton_kernels import gelu_and_slope

# Below this a row's largest value counts as this: its reciprocal must stay finite.
LEAST = tl.constexpr(1e-30)


@triton.jit
def _quantized(scaled, DTYPE: tl.constexpr):
    """The bits, as int8, of values within a rounding of the largest of DTYPE, halves to even."""
    if DTYPE == tl.int8:  # noqa: SIM300
        # 1.5 · 2²³: what is left of the sum's digits are whole numbers, the lowest eight of them int8's own bits.
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return scaled.to(DTYPE).to(tl.int8, bitcast=True)


@triton.jit
def _value(x_ptr, gradient_ptr, m, c, M, C, GELU: tl.constexpr):
    """x; with GELU: gelu(x), or with a gradient too: gradient · gelu'(x). Zero past the edges."""
    at = m[:, None] * C + c[None, :]
    mask = (m[:, None] < M) & (c[None, :] < C)
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if GELU:
        activation, slope = gelu_and_slope(x, False)
        if gradient_ptr is None:
            x = activation
        else:
            x = slope * tl.load(gradient_ptr + at, mask=mask, other=0.0).to(tl.float32)
    return x


@triton.jit
def rows_kernel(
    x_ptr, gradient_ptr, q_ptr, scale_ptr, M, C,
    GELU: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """ROWS rows of q (M, C) and their scales. A row is read once, as FIRST columns and up to SECOND more.

    Two powers of two: the next one above 768, 1152 or 3072 would be a third of idle lanes.
    """
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, FIRST)
    value = _value(x_ptr, gradient_ptr, m, c, M, C, GELU)
    top = tl.maximum(tl.max(tl.abs(value), axis=1), LEAST)
    if SECOND:
        d = FIRST + tl.arange(0, SECOND)
        rest = _value(x_ptr, gradient_ptr, m, d, M, C, GELU)
        top = tl.maximum(top, tl.max(tl.abs(rest), axis=1))
    factor = tl.div_rn(LARGEST, top)[:, None]
    in_m = m[:, None] < M
    tl.store(q_ptr + m[:, None] * C + c[None, :], _quantized(value * factor, DTYPE), mask=in_m & (c[None, :] < C))
    if SECOND:
        tl.store(q_ptr + m[:, None] * C + d[None, :], _quantized(rest * factor, DTYPE), mask=in_m & (d[None, :] < C))
    tl.store(scale_ptr + m, tl.div_rn(top, LARGEST), mask=m < M)


@triton.jit
def _floats(q, DTYPE: tl.constexpr):
    """Values of which these are the bits, in float32; DTYPE None: they are floating already."""
    if DTYPE is not None:
        q = q.to(DTYPE, bitcast=True)
    return q.to(tl.float32)


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
        value = _floats(q, DTYPE) * tl.load(scale_ptr + m, mask=m < M, other=0.0)[:, None]
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(value, axis=0), mask=c < C)


@triton.jit
def column_tops_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, sums_ptr, M, C, STEPS,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The largest |x · factors| of each column into top (C), which is zero before: a maximum knows no order.

    And the sums over this program's rows of x · factor into sums (programs, C). KIND: what x is the bits of, or None.
    """
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.zeros([ROWS, COLUMNS], tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for step in tl.range(STEPS, num_stages=3):
        m = (tl.program_id(0).to(tl.int64) * STEPS + step) * ROWS + tl.arange(0, ROWS)
        x = tl.load(x_ptr + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0)
        x = _floats(x, KIND)
        if factor_ptr is not None:
            x *= tl.load(factor_ptr + m, mask=m < M, other=0.0)[:, None]
            if sums_ptr is not None:
                total += tl.sum(x, axis=0)
            x *= tl.load(other_factor_ptr + m, mask=m < M, other=0.0)[:, None]
        top = tl.maximum(top, tl.abs(x))
    tl.atomic_max(top_ptr + c, tl.max(top, axis=0), mask=c < C)
    if sums_ptr is not None:
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * C + c, total, mask=c < C)


@triton.jit
def columns_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, qt_ptr, scale_ptr, M, M_PADDED, C,
    KIND: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile of qt (C, M_PADDED): x · factors over its column's scale."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.maximum(tl.load(top_ptr + c, mask=c < C, other=0.0), LEAST)
    x = tl.load(x_ptr + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0)
    x = _floats(x, KIND)
    if factor_ptr is not None:
        factor = tl.load(factor_ptr + m, mask=m < M, other=0.0) * tl.load(other_factor_ptr + m, mask=m < M, other=0.0)
        x *= factor[:, None]
    q = _quantized(x * tl.div_rn(LARGEST, top)[None, :], DTYPE)
    at = c.to(tl.int64)[:, None] * M_PADDED + m[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(c[:, None] < C) & (m[None, :] < M_PADDED))
    if tl.program_id(0) == 0:
        tl.store(scale_ptr + c, tl.div_rn(top, LARGEST), mask=c < C)
