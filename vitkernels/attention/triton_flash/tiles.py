"""Device functions that the flash-attention kernels share: tiles of rows in and out of memory, and masked scores.

A head dim that is no power of two is kept as two tiles, D1 and D2 columns wide (80 = 64 + 16, 88 = 64 + 32 with the
last 8 masked), because padding it to 128 would cost up to 1.6 times the work. D2 = 0 means that the first tile holds
all of it; the second is then a copy of the first that nobody uses.

Shape suffixes: N query tokens of a tile, M key tokens of a tile, D head dim.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # softmax is computed with exp2, which is one instruction


@triton.jit
def _load_columns(
    ptr, rows, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + rows[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > D:
        inside = columns[None, :] < D
        if MASKED:
            inside = inside & (rows[:, None] < limit)
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_rows(ptr, rows, stride, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr):
    """Rows of a (tokens, D) matrix as tiles of D1 and D2 columns; with MASKED, rows from `limit` on are zeros."""
    x1 = _load_columns(ptr, rows, stride, limit, 0, D1, D, MASKED)
    x2 = x1
    if D2 > 0:
        x2 = _load_columns(ptr, rows, stride, limit, D1, D2, D, MASKED)
    return x1, x2


@triton.jit
def _store_columns(
    ptr, x, rows, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + rows[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > D:
        inside = columns[None, :] < D
        if MASKED:
            inside = inside & (rows[:, None] < limit)
        tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(ptr.dtype.element_ty))


@triton.jit
def store_rows(
    ptr, x1, x2, rows, stride, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr
):
    """The opposite of load_rows; rows from `limit` on are not written."""
    _store_columns(ptr, x1, rows, stride, limit, 0, D1, D, MASKED)
    if D2 > 0:
        _store_columns(ptr, x2, rows, stride, limit, D1, D2, D, MASKED)


@triton.jit
def inner(a1, a2, b1, b2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """a bᵀ over the head dim, in float32."""
    c = tl.dot(a1, tl.trans(b1), input_precision=PRECISION)
    if D2 > 0:
        c = tl.dot(a2, tl.trans(b2), c, input_precision=PRECISION)
    return c


@triton.jit
def zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Accumulators for a tile of rows."""
    acc1 = tl.zeros([ROWS, D1], tl.float32)
    acc2 = acc1
    if D2 > 0:
        acc2 = tl.zeros([ROWS, D2], tl.float32)
    return acc1, acc2


@triton.jit
def head_offset(head, H, stride_b, stride_h):
    """Where a head starts, in elements. Strides are multiples of 8; saying so allows loads of 16 bytes."""
    b = (head // H).to(tl.int64)
    return tl.multiple_of(b * stride_b + head % H * stride_h, 8)


@triton.jit
def outer(w, x1, x2, acc1, acc2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """acc + w x for weights w of (rows, tokens) and rows x of (tokens, D)."""
    acc1 = tl.dot(w, x1, acc1, input_precision=PRECISION)
    if D2 > 0:
        acc2 = tl.dot(w, x2, acc2, input_precision=PRECISION)
    return acc1, acc2


@triton.jit
def modified_scores(
    s, n, m, N, M,
    bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
    CAUSAL: tl.constexpr,
):  # fmt: skip
    """Scores in log2 units with the bias added, -inf where query n does not see key m.

    n and m hold the token numbers in the shape of a row and a column of s, either way around. Pointers are to this
    batch entry and head; one that is None is left out.
    """
    keep = (n < N) & (m < M)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + n * bias_n + m * bias_m, mask=keep, other=0.0)
        s += bias.to(tl.float32) * LOG2E
    if mask_ptr is not None:
        keep = keep & (tl.load(mask_ptr + n * mask_n + m * mask_m, mask=keep, other=0) != 0)
    if segment_ptr is not None:
        of_n = tl.load(segment_ptr + n * segment_n, mask=n < N, other=0)
        of_m = tl.load(segment_ptr + m * segment_n, mask=m < M, other=0)
        keep = keep & (of_n == of_m)
    if CAUSAL:
        keep = keep & (n >= m)
    return tl.where(keep, s, float("-inf"))
