"""Triton kernels of 8-bit quantization: scales along rows and columns, and transposed copies.

Hopper's 8-bit tensor cores require both operands to be contiguous along the summed dimension, hence the transposed
copies. q and qt are int8 pointers for every dtype: the kernels store bits. No kernel is specialized on what depends on
the batch size, so that one serves all.

Shape suffixes: M rows (tokens), C columns (channels).
"""

import triton
import triton.language as tl

from vitkernels.ops.eight_bit_format import MIN_MAGNITUDE
from vitkernels.ops.linear_gelu.triton_kernels import gelu_and_slope

LEAST = tl.constexpr(MIN_MAGNITUDE)


@triton.jit
def _quantized(scaled, DTYPE: tl.constexpr):
    """Return the bits, as int8, of values rounded half to even; they exceed DTYPE's range by one rounding at most."""
    if DTYPE == tl.int8:  # noqa: SIM300
        # Adding 1.5 · 2²³ leaves an integer in the mantissa, whose lowest eight bits are those of the int8.
        return (scaled + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    return scaled.to(DTYPE).to(tl.int8, bitcast=True)


@triton.jit
def _value(x_ptr, gradient_ptr, m, c, M, C, GELU: tl.constexpr):
    """Return x, or with GELU gelu(x), or gradient · gelu'(x) if a gradient is given; zero out of bounds."""
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


@triton.jit(do_not_specialize=["M"])
def rows_kernel(
    x_ptr, gradient_ptr, q_ptr, scale_ptr, M, C,
    GELU: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Compute ROWS rows of q (M, C) and their scales. A row is read once, as FIRST columns and up to SECOND more.

    Both are powers of two. A single power of two above 768, 1152 or 3072 would leave a third of the lanes idle.
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
    """Return the float32 values of bits of DTYPE, or of floating-point numbers if DTYPE is None."""
    if DTYPE is not None:
        q = q.to(DTYPE, bitcast=True)
    return q.to(tl.float32)


@triton.jit(do_not_specialize=["M"])
def transpose_kernel(
    q_ptr, scale_ptr, qt_ptr, sums_ptr, M, M_PADDED, C,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store one tile of qt (C, M_PADDED), zeros past M, and its sums of q · scale over rows in sums (programs, C)."""
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    q = tl.load(q_ptr + m[:, None] * C + c[None, :], mask=(m[:, None] < M) & (c[None, :] < C), other=0)
    at = c.to(tl.int64)[:, None] * M_PADDED + m[None, :]
    tl.store(qt_ptr + at, tl.trans(q), mask=(c[:, None] < C) & (m[None, :] < M_PADDED))
    if sums_ptr is not None:
        value = _floats(q, DTYPE) * tl.load(scale_ptr + m, mask=m < M, other=0.0)[:, None]
        tl.store(sums_ptr + tl.program_id(0).to(tl.int64) * C + c, tl.sum(value, axis=0), mask=c < C)


@triton.jit(do_not_specialize=["M", "STEPS"])
def column_tops_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, sums_ptr, M, C, STEPS,
    KIND: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update top (C), initially zero, with the largest |x · factors| of each column.

    The atomic maximum does not depend on the order of programs. The sums of x · factor over this program's rows go to
    sums (programs, C). KIND: the 8-bit dtype of x, or None.
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


@triton.jit(do_not_specialize=["M"])
def columns_kernel(
    x_ptr, factor_ptr, other_factor_ptr, top_ptr, qt_ptr, scale_ptr, M, M_PADDED, C,
    KIND: tl.constexpr, LARGEST: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store one tile of qt (C, M_PADDED), x · factors divided by its column's scale."""
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
