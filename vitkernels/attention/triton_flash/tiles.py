"""Device functions that the flash-attention kernels share: tile loads and stores, products, per-head pointers, masks.

A head dim that is not a power of two is held as two tiles, D1 and D2 columns wide (80 = 64 + 16, 88 = 64 + 32 with the
last 8 masked). Padding it to 128 would cost up to 1.6 times the work. D2 = 0 means that the first tile holds the entire
head dim; the second tile is then an unused alias of the first. D1 = D2 means halves of the head dim, each padded to a
power of two: q and k are held so if halves rotate.

`rows` is a tuple (pointer to a head's first row, row stride in elements). `extras` is a tuple of pointer (or None),
offset of the head, and strides along n and m, for the bias, the mask and the segments (one stride) in turn. `rope` is a
tuple (pointer or None, offset of the head, row stride, number of first tokens that are not rotated).

Shape suffixes: N query tokens of a tile, M key tokens of a tile, D head dim.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)  # softmax uses exp2, a single instruction


@triton.jit
def _load_columns(
    ptr, n, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, end: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + n[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > end:
        inside = columns[None, :] < end
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
    second: tl.constexpr = D // 2 if D1 == D2 else (D1 if D2 > 0 else D)
    x1 = _load_columns(ptr, n, stride, limit, 0, D1, second, MASKED)
    x2 = x1
    if D2 > 0:
        x2 = _load_columns(ptr, n, stride, limit, second, D2, D, MASKED)
    return x1, x2


@triton.jit
def _sines(rope, n, limit, first: tl.constexpr, WIDTH: tl.constexpr, end: tl.constexpr, D: tl.constexpr):
    """Return sines and cosines of rows n in float32: 0 and 1 for tokens that are not rotated."""
    ptr, at_head, stride, skipped = rope
    columns = first + tl.arange(0, WIDTH)
    at = ptr + at_head + (n[:, None] - skipped) * stride + columns[None, :]
    inside = (columns[None, :] < end) & (n[:, None] >= skipped) & (n[:, None] < limit)
    sin = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(at + D, mask=inside, other=1.0).to(tl.float32)
    return sin, cos


@triton.jit
def _swapped_pairs(x):
    """Return x with columns 2i and 2i + 1 exchanged."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(odd, even), x.shape)


@triton.jit
def _rotated_pairs(x, rope, n, limit, first: tl.constexpr, D: tl.constexpr, INVERSE: tl.constexpr):
    """Rotate columns (2i, 2i + 1) of float32 rows; with INVERSE, multiply by the transposed matrix."""
    WIDTH: tl.constexpr = x.shape[1]
    sin, cos = _sines(rope, n, limit, first, WIDTH, D, D)
    sign = (tl.arange(0, WIDTH) % 2 * 2 - 1).to(tl.float32)[None, :]
    if INVERSE:
        return x * cos - sign * _swapped_pairs(x * sin)
    return x * cos + sign * _swapped_pairs(x) * sin


@triton.jit
def rotated(
    x1, x2, rope, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, INVERSE: tl.constexpr
):  # fmt: skip
    """Apply rotary embeddings to rows n of float32 tiles: halves if D1 = D2, else pairs of columns.

    INVERSE multiplies by the transposed rotation matrix, which takes gradients of rotated rows to those of the rows.
    """
    if D1 == D2:
        sin1, cos1 = _sines(rope, n, limit, 0, D1, D // 2, D)
        sin2, cos2 = _sines(rope, n, limit, D // 2, D1, D, D)
        if INVERSE:
            y1, y2 = x1 * cos1 + x2 * sin2, x2 * cos2 - x1 * sin1
        else:
            y1, y2 = x1 * cos1 - x2 * sin1, x2 * cos2 + x1 * sin2
    else:
        y1 = _rotated_pairs(x1, rope, n, limit, 0, D, INVERSE)
        y2 = y1
        if D2 > 0:
            y2 = _rotated_pairs(x2, rope, n, limit, D1, D, INVERSE)
    return y1, y2


@triton.jit
def load_rotated(rows, rope, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr):
    """Load rows n of q or k like `load_rows`, rotated in float32 and rounded to their dtype if the call has `rope`."""
    x1, x2 = load_rows(rows, n, limit, D, D1, D2, MASKED)
    if rope[0] is not None:
        dtype: tl.constexpr = x1.dtype
        x1, x2 = rotated(x1.to(tl.float32), x2.to(tl.float32), rope, n, limit, D, D1, D2, False)
        x1, x2 = x1.to(dtype), x2.to(dtype)
    return x1, x2


@triton.jit
def _store_columns(
    ptr, x, n, stride, limit, first: tl.constexpr, WIDTH: tl.constexpr, end: tl.constexpr, MASKED: tl.constexpr
):
    columns = first + tl.arange(0, WIDTH)
    at = ptr + n[:, None] * stride + columns[None, :]
    if MASKED or first + WIDTH > end:
        inside = columns[None, :] < end
        if MASKED:
            inside = inside & (n[:, None] < limit)
        tl.store(at, x.to(ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(ptr.dtype.element_ty))


@triton.jit
def store_rows(rows, x1, x2, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr):
    """Store tiles of D1 and D2 columns as rows n; with MASKED, rows from `limit` on are not written."""
    ptr, stride = rows
    second: tl.constexpr = D // 2 if D1 == D2 else (D1 if D2 > 0 else D)
    _store_columns(ptr, x1, n, stride, limit, 0, D1, second, MASKED)
    if D2 > 0:
        _store_columns(ptr, x2, n, stride, limit, second, D2, D, MASKED)


@triton.jit
def store_unrotated(
    rows, rope, x1, x2, n, limit, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, MASKED: tl.constexpr
):
    """Store the gradient of q or k like `store_rows`, given the float32 gradient of the rotated rows."""
    if rope[0] is not None:
        x1, x2 = rotated(x1, x2, rope, n, limit, D, D1, D2, True)
    store_rows(rows, x1, x2, n, limit, D, D1, D2, MASKED)


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
def owned_rows(program, table_ptr, tiles, H):
    """Return the head of a program, and its row of the table: first, end, start, compares; see `segment_tiles`."""
    head = program // tiles
    row = table_ptr + (tl.cast(head // H, tl.int64) * tiles + program % tiles) * 4
    return head, tl.load(row), tl.load(row + 1), tl.load(row + 2), tl.load(row + 3)


@triton.jit
def rows_of_head(ptr, head, H, stride_b, stride_h, stride_n):
    """Return (pointer, row stride) of a head; `head` counts the heads of all batch entries."""
    return rows_of_entry(ptr, (head // H).to(tl.int64), head % H, stride_b, stride_h, stride_n)


@triton.jit
def rows_of_entry(ptr, b, h, stride_b, stride_h, stride_n):
    """Return (pointer, row stride) of head h of batch entry b, an int64.

    Strides are multiples of 8; the hint enables 16-byte loads.
    """
    return ptr + tl.multiple_of(b * stride_b + h * stride_h, 8), tl.multiple_of(stride_n, 8)


@triton.jit
def full_rows(rows, TILE: tl.constexpr, TAIL: tl.constexpr):
    """Return the number of rows in the tiles before the tail, which is not empty if TAIL > 0."""
    full = rows
    if TAIL > 0:
        full = (rows - 1) // TILE * TILE
    return full


@triton.jit
def rows_from(rows, start):
    """Return (pointer, row stride) of a head's rows from `start` on."""
    ptr, stride = rows
    return ptr + tl.multiple_of(tl.cast(start, tl.int64) * stride, 8), stride


# --- scores and weights -----------------------------------------------------------------------------------------------
# Scores are in log2 units, except with a bias, where they are in natural ones: a bias near the end of float32's range,
# as padding masks use, would overflow to -inf if multiplied by log2 e. In a row of such biases the log-sum-exp would
# round to the maximum, so calls with a bias save the maximum and the logarithm of the sum separately.


@triton.jit
def score_factor(scale, extras):
    """Return the factor that takes q kᵀ to scores in the call's unit."""
    factor = scale
    if extras[0] is None:
        factor = scale * LOG2E
    return factor


@triton.jit
def exponential(x, extras):
    """Return exp of differences between scores, which are in the call's unit."""
    if extras[0] is not None:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def statistics_of_head(ptr, head, N, extras):
    """Return a pointer to a head's N log-sum-exps; with a bias, to its N maxima, followed by N log2-sums."""
    at = head.to(tl.int64) * N
    if extras[0] is not None:
        at = at * 2
    return ptr + at


@triton.jit
def store_statistics(ptr, row_max, row_sum, n, N, extras):
    """Store the log-sum-exps of queries n; with a bias, their maxima and the log2 of their sums."""
    if extras[0] is not None:
        tl.store(ptr + n, row_max, mask=n < N)
        tl.store(ptr + N + n, tl.log2(row_sum), mask=n < N)
    else:
        tl.store(ptr + n, row_max + tl.log2(row_sum), mask=n < N)


@triton.jit
def load_statistics(ptr, n, N, extras, MASKED: tl.constexpr):
    """Load what `weights_of` needs of queries n; with MASKED, queries from N on have weights of 0."""
    base = tl.load(ptr + n, mask=n < N, other=float("inf")) if MASKED else tl.load(ptr + n)
    log_sum = base
    if extras[0] is not None:
        log_sum = tl.load(ptr + N + n, mask=n < N, other=0.0)
    return base, log_sum


@triton.jit
def weights_of(s, base, log_sum, extras):
    """Return the softmax weights of scores s; the other arguments come from `load_statistics`, shaped to broadcast."""
    return tl.exp2((s - base) * LOG2E - log_sum) if extras[0] is not None else tl.exp2(s - base)


@triton.jit
def modified_scores(s, n, m, N, M, extras, CAUSAL: tl.constexpr):
    """Return scores with the bias added, -inf where query n may not attend to key m.

    n and m hold the token numbers, shaped as a column and a row of s or the other way around.
    """
    inside = (n < N) & (m < M)
    if extras[0] is not None:
        s += load_bias(n, m, inside, extras)
    keep = attended(n, m, N, M, inside, extras)
    if CAUSAL:
        keep = keep & (n >= m)
    return tl.where(keep, s, float("-inf"))


@triton.jit
def load_bias(n, m, inside, extras):
    """Load the bias of queries n and keys m in float32, where `inside` is true."""
    bias_ptr, bias_at, bias_n, bias_m = extras[0], extras[1], extras[2], extras[3]
    return tl.load(bias_ptr + bias_at + n * bias_n + m * bias_m, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def attended(n, m, N, M, inside, extras):
    """Return where query n attends to key m: where mask and segments allow it, and `inside` says that both exist."""
    keep = inside
    mask_ptr, mask_at, mask_n, mask_m = extras[4], extras[5], extras[6], extras[7]
    segment_ptr, segment_at, segment_n = extras[8], extras[9], extras[10]
    if mask_ptr is not None:
        keep = keep & (tl.load(mask_ptr + mask_at + n * mask_n + m * mask_m, mask=inside, other=0) != 0)
    if segment_ptr is not None:
        of_n = tl.load(segment_ptr + segment_at + n * segment_n, mask=n < N, other=0)
        of_m = tl.load(segment_ptr + segment_at + m * segment_n, mask=m < M, other=0)
        keep = keep & (of_n == of_m)
    return keep


@triton.jit
def tiles_in_common(extras, own, own_limit, limit, STEP: tl.constexpr):
    """Return the first token, and the end, of the range outside which no token shares a segment with tokens `own`.

    The range is found from the least and greatest id of `own`, so it is tight if segments are contiguous and ordered,
    as packing makes them. It begins at a multiple of STEP.
    """
    segment_ptr, segment_at, segment_n = extras[8], extras[9], extras[10]
    ids = tl.load(segment_ptr + segment_at + own * segment_n, mask=own < own_limit, other=0)
    # Rows beyond the last token repeat the last one's id.
    last = tl.load(segment_ptr + segment_at + (own_limit - 1) * segment_n)
    ids = tl.where(own < own_limit, ids, last)
    least, greatest = tl.min(ids, 0), tl.max(ids, 0)
    start, end = limit, limit * 0
    for first in range(0, limit, STEP):
        other = first + tl.arange(0, STEP)
        of_other = tl.load(segment_ptr + segment_at + other * segment_n, mask=other < limit, other=0)
        shared = (of_other >= least) & (of_other <= greatest) & (other < limit)
        start = tl.minimum(start, tl.min(tl.where(shared, other, limit), 0))
        end = tl.maximum(end, tl.max(tl.where(shared, other + 1, 0), 0))
    return start // STEP * STEP, end
