"""Device functions that the flash-attention kernels share: tile loads and stores, products, per-head pointers, masks.

A head dim that is not a power of two is held as two tiles, D1 and D2 columns wide (80 = 64 + 16, 88 = 64 + 32 with the
last 8 masked). Padding it to 128 would cost up to 1.6 times the work. D2 = 0 means that the first tile holds the entire
head dim; the second tile is then an unused alias of the first.

`rows` is a tuple (pointer to a head's first row, row stride in elements). `extras` is a tuple of pointer (or None),
offset of the head, and strides along n and m, for the bias, the mask and the segments (one stride) in turn. Strides of
bias and mask are None for adjacent elements: along m for rows of `padded_keys`, along n after `keys_first`. If both are
None, all queries share one row of `padded_keys`.

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
    x1 = _load_columns(ptr, n, stride, limit, 0, D1, D, MASKED)
    x2 = x1
    if D2 > 0:
        x2 = _load_columns(ptr, n, stride, limit, D1, D2, D, MASKED)
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
# Without a bias, scores are q kᵀ, and the factor that scales them to log2 units is applied after the maximum of a row.
# So the scale must be positive: the largest q kᵀ must have the largest score, and 0 * -inf is not -inf.
#
# With a bias, scores are scaled before it is added, in natural units: a bias near the end of float32's range, as
# padding masks use, would overflow to -inf if multiplied by log2 e. In a row of such biases the log-sum-exp would round
# to the maximum, so calls with a bias save the maximum and the logarithm of the sum separately.


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
        log_sum = tl.load(ptr + N + n, mask=n < N, other=0.0) if MASKED else tl.load(ptr + N + n)
    return base, log_sum


@triton.jit
def largest_score(s, scale, extras):
    """Return the largest score of each row of `modified_scores`."""
    largest = tl.max(s, 1)
    if extras[0] is None:
        largest = largest * scale
    return largest


@triton.jit
def weights_of(s, scale, base, log_sum, extras):
    """Return the softmax weights of `modified_scores`.

    Without a bias, scaling fuses into the exponent's multiply-add. base, log_sum: from `load_statistics`, shaped to
    broadcast.
    """
    return tl.exp2((s - base) * LOG2E - log_sum) if extras[0] is not None else tl.exp2(s * scale - base)


@triton.jit
def modified_scores(s, scale, n, m, N, M, extras, CAUSAL: tl.constexpr):
    """Return q kᵀ, scaled and with the bias added if the call has one; -inf where query n may not attend to key m.

    n and m hold the token numbers, shaped as a column and a row of s or the other way around. The scores of queries
    from N on are arbitrary; so are those of keys from M on, if the bias or mask comes from `keys_first`.
    """
    bias_ptr, mask_ptr, segment_ptr, segment_at, segment_n = extras[0], extras[4], extras[8], extras[9], extras[10]
    if bias_ptr is not None:
        s = s * scale + load_bias(n, m, N, M, extras)
    if mask_ptr is not None:
        s = tl.where(load_mask(n, m, N, M, extras), s, float("-inf"))
    if bias_ptr is None and mask_ptr is None:  # their padding hides the keys from M on
        s = tl.where(m < M, s, float("-inf"))
    if segment_ptr is not None:
        of_n = tl.load(segment_ptr + segment_at + n * segment_n, mask=n < N, other=0)
        of_m = tl.load(segment_ptr + segment_at + m * segment_n, mask=m < M, other=0)
        s = tl.where(of_n == of_m, s, float("-inf"))
    if CAUSAL:
        s = tl.where(n >= m, s, float("-inf"))
    return s


@triton.jit
def _load_elements(ptr, n, m, N, M, stride_n, stride_m):
    """Load the elements (n, m) of a bias or mask. Rows beyond the last repeat it, so that no load needs a mask."""
    if stride_m is not None:
        at = ptr + tl.minimum(m, M - 1) * stride_m + n
    elif stride_n is not None:
        at = ptr + tl.minimum(n, N - 1) * stride_n + m
    else:
        at = ptr + m
    return tl.load(at)


@triton.jit
def load_bias(n, m, N, M, extras):
    """Return the bias of queries n and keys m in float32; see `modified_scores` for n >= N and m >= M."""
    return _load_elements(extras[0] + extras[1], n, m, N, M, extras[2], extras[3]).to(tl.float32)


@triton.jit
def load_mask(n, m, N, M, extras):
    """Return whether the mask lets query n attend to key m; see `modified_scores` for n >= N and m >= M."""
    return _load_elements(extras[4] + extras[5], n, m, N, M, extras[6], extras[7]) != 0


# --- the gradients of scores that are stored --------------------------------------------------------------------------


GROUP = tl.constexpr(32)  # scores, of which stored rows are multiples


@triton.jit
def row_length(M):
    """Return the length of a stored row of scores."""
    return tl.cdiv(M, GROUP) * GROUP


@triton.jit
def store_scores(ptr, x, n, m, N, M):
    """Store the values (n, m) of a head's scores, as far as its rows have them."""
    tl.store(ptr + n * row_length(M) + m, x, mask=(n < N) & (m < row_length(M)))


# --- which tiles a program visits -------------------------------------------------------------------------------------


@triton.jit
def keys_in_reach(extras, n, first_n, N, M, STEP: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first key, a multiple of STEP, and the end of the range outside which queries n attend to no key."""
    start = 0
    end = M
    if extras[8] is not None:
        start, end = _tokens_in_common(extras, n, N, M, STEP)
    if extras[4] is not None and extras[6] is None and extras[7] is None:
        first, last = _kept_keys(extras, M, STEP)
        start = tl.maximum(start, first)
        end = tl.minimum(end, last)
    if CAUSAL:
        end = tl.minimum(end, first_n + n.shape[0])
    return start, end


@triton.jit
def queries_in_reach(extras, m, first_m, N, M, STEP: tl.constexpr, CAUSAL: tl.constexpr):
    """Return the first query, a multiple of STEP, and the end of the range outside which no query attends to keys m."""
    start = 0
    end = N
    if extras[8] is not None:
        start, end = _tokens_in_common(extras, m, M, N, STEP)
    if extras[4] is not None and extras[6] is None and extras[7] is None:
        kept = tl.load(extras[4] + extras[5] + m, mask=m < M, other=0)
        end = tl.where(tl.max(kept.to(tl.int32), 0) != 0, end, 0)
    if CAUSAL:
        start = tl.maximum(start, first_m // STEP * STEP)
    return start, end


@triton.jit
def _kept_keys(extras, M, STEP: tl.constexpr):
    """Return the first key, rounded down to a multiple of STEP, and the end of those that a mask without rows keeps."""
    WIDE: tl.constexpr = 256
    start, end = M, M * 0
    for first in range(0, M, WIDE):
        m = first + tl.arange(0, WIDE)
        kept = tl.load(extras[4] + extras[5] + m, mask=m < M, other=0) != 0
        start = tl.minimum(start, tl.min(tl.where(kept, m, M), 0))
        end = tl.maximum(end, tl.max(tl.where(kept, m + 1, 0), 0))
    return start // STEP * STEP, end


@triton.jit
def _tokens_in_common(extras, own, own_limit, limit, STEP: tl.constexpr):
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
