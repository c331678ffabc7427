"""Device functions that the flash-attention kernels share: tile loads and stores, products, per-head pointers, masks.

A head dim that is not a power of two is held as two tiles, D1 and D2 columns wide (80 = 64 + 16, 88 = 64 + 32 with the
last 8 masked). Padding it to 128 would cost up to 1.6 times the work. D2 = 0 means that the first tile holds the entire
head dim; the second tile is then an unused alias of the first.

`rows` is a tuple (pointer to a head's first row, row stride in elements). `extras` is a tuple of pointer (or None),
offset of the head, and strides along n and m, for the bias, the mask and the segments (one stride) in turn.

Shape suffixes: N query tokens of a tile, M key tokens of a tile, D head dim.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # softmax uses exp2, a single instruction


@triton.jit
def _load_columns(
    ptr, n, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + n[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > D:
        inside = columns[None, :] < D
        if MASKED:
            inside = inside & (n[:, None] < limit)
        x = tl.load(at, mask=inside, other=0.0)
    else:
        x = tl.load(at)
    return x


@triton.jit
def load_rows(rows, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr):
    """Load rows n of a (tokens, D) matrix as tiles of D1 and D2 columns; with MASKED, rows from `limit` on are zero."""
    ptr, stride = rows
    x1 = _load_columns(ptr, n, stride, limit, 0, D1, D, MASKED)
    x2 = x1
    if D2 > 0:
        x2 = _load_columns(ptr, n, stride, limit, D1, D2, D, MASKED)
    return x1, x2


@triton.jit
def _store_columns(
    ptr, x, n, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + n[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > D:
        inside = columns[None, :] < D
        if MASKED:
            inside = inside & (n[:, None] < limit)
        tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(ptr.dtype.element_ty))


@triton.jit
def store_rows(rows, x1, x2, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr):
    """Store tiles of D1 and D2 columns as rows n; with MASKED, rows from `limit` on are not written."""
    ptr, stride = rows
    _store_columns(ptr, x1, n, stride, limit, 0, D1, D, MASKED)
    if D2 > 0:
        _store_columns(ptr, x2, n, stride, limit, D1, D2, D, MASKED)


@triton.jit
def inner(a1, a2, b1, b2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """Return a bᵀ over the head dim, accumulated in float32."""
    c = tl.dot(a1, tl.trans(b1), input_precision=PRECISION)
    if D2 > 0:
        c = tl.dot(a2, tl.trans(b2), c, input_precision=PRECISION)
    return c


@triton.jit
def outer(w, x1, x2, acc1, acc2, D2: tl.constexpr, PRECISION: tl.constexpr):
    """Return acc + w x for weights w of (rows, tokens) and rows x of (tokens, D)."""
    acc1 = tl.dot(w, x1, acc1, input_precision=PRECISION)
    if D2 > 0:
        acc2 = tl.dot(w, x2, acc2, input_precision=PRECISION)
    return acc1, acc2


@triton.jit
def zeros(ROWS: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr):
    """Return float32 accumulators for a tile of rows."""
    acc1 = tl.zeros([ROWS, D1], tl.float32)
    acc2 = acc1
    if D2 > 0:
        acc2 = tl.zeros([ROWS, D2], tl.float32)
    return acc1, acc2


# --- the prologue: from a program's number to its head's pointers -----------------------------------------------------


@triton.jit
def owned_tile(program, tokens, TILE: tl.constexpr):
    """Return the head, and the first token of the tile, that a program owns; a head's tiles are consecutive."""
    tiles = tl.cdiv(tokens, TILE)
    return program // tiles, program % tiles * TILE


@triton.jit
def rows_of_head(ptr, head, H, stride_b, stride_h, stride_n):
    """Return (pointer, row stride) of a head. Strides are multiples of 8; the hint enables 16-byte loads."""
    b = (head // H).to(tl.int64)
    return ptr + tl.multiple_of(b * stride_b + head % H * stride_h, 8), tl.multiple_of(stride_n, 8)


@triton.jit
def modified_scores(s, n, m, N, M, extras, CAUSAL: tl.constexpr):
    """Return scores in log2 units with the bias added, -inf where query n may not attend to key m.

    n and m hold the token numbers, shaped as a column and a row of s or the other way around.
    """
    bias_ptr, bias_at, bias_n, bias_m, mask_ptr, mask_at, mask_n, mask_m, segment_ptr, segment_at, segment_n = extras
    keep = (n < N) & (m < M)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + bias_at + n * bias_n + m * bias_m, mask=keep, other=0.0)
        s += bias.to(tl.float32) * LOG2E
    if mask_ptr is not None:
        keep = keep & (tl.load(mask_ptr + mask_at + n * mask_n + m * mask_m, mask=keep, other=0) != 0)
    if segment_ptr is not None:
        of_n = tl.load(segment_ptr + segment_at + n * segment_n, mask=n < N, other=0)
        of_m = tl.load(segment_ptr + segment_at + m * segment_n, mask=m < M, other=0)
        keep = keep & (of_n == of_m)
    if CAUSAL:
        keep = keep & (n >= m)
    return tl.where(keep, s, float("-inf"))
