"""Triton kernels of paged attention: one query token per sequence against splits of its pages, and their combination.

Flash-Decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): each sequence is cut into splits with
separate softmaxes, so that a small batch fills the GPU. Splits have equal lengths, so that ragged batches balance.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads per key head, D head dim, P pages,
S tokens per page, T pages per sequence, N tokens of a tile, C splits.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _clamped_length(lens_ptr, capacity):
    """Return a sequence's length, clamped to what its table can hold, and whether it was in range."""
    length = tl.load(lens_ptr)
    valid = (length >= 0) & (length <= capacity)
    return tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32), valid


@triton.jit
def _pages_of(table_ptr, tables_t, start, n, keep, P, S: tl.constexpr, TILE_N: tl.constexpr):
    """Return the page of each token n of a tile, 0 if it is outside the cache, and whether it is inside."""
    if S % TILE_N == 0:  # the tile is within one page
        page = tl.load(table_ptr + start // S * tables_t)
    else:
        page = tl.load(table_ptr + n // S * tables_t, mask=keep, other=0)
    inside = (page >= 0) & (page < P)
    return tl.where(inside, page, 0).to(tl.int64), inside


@triton.jit
def _soft_capped(s, soft_cap):
    """Return soft_cap · tanh(s / soft_cap)."""
    fade = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / soft_cap))
    return tl.where(s < 0, -soft_cap, soft_cap) * ((1.0 - fade) / (1.0 + fade))


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, tables_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_d, k_k, k_p, k_s, v_k, v_p, v_s, lens_b, tables_b, tables_t, out_b, out_h, out_c,
    K, P, capacity, split, splits, soft_cap,
    G: tl.constexpr, TILE_G: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, S: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Attend to one split of one sequence, for a tile of the query heads of one key head; log-sum-exp in log2 units.

    split: tokens per split, a multiple of TILE_N. SPLIT: whether sequences have several; else lse_ptr is unused.
    Programs that share keys and values are adjacent, for the cache. A page outside the cache makes the result NaN.
    """
    program = tl.program_id(0)
    tiles: tl.constexpr = (G + TILE_G - 1) // TILE_G
    g = program % tiles * TILE_G + tl.arange(0, TILE_G)
    c = program // tiles % splits
    kv = program // tiles // splits % K
    b = (program // tiles // splits // K).to(tl.int64)
    if ALIGNED:
        k_p, k_s = tl.multiple_of(k_p, 8), tl.multiple_of(k_s, 8)
        v_p, v_s = tl.multiple_of(v_p, 8), tl.multiple_of(v_s, 8)
        k_k, v_k = tl.multiple_of(k_k, 8), tl.multiple_of(v_k, 8)
    length, valid = _clamped_length(lens_ptr + b * lens_b, capacity)
    first = c * split
    last = tl.minimum(length, first + split)
    if SPLIT and first >= length:
        return
    d = tl.arange(0, TILE_D)
    heads = (g[:, None] < G) & (d[None, :] < D)
    q = tl.load(q_ptr + b * q_b + (kv * G + g)[:, None] * q_h + d[None, :] * q_d, mask=heads, other=0.0)
    k_ptr += kv.to(tl.int64) * k_k
    v_ptr += kv.to(tl.int64) * v_k
    maximum = tl.full([TILE_G], float("-inf"), tl.float32)
    total = tl.zeros([TILE_G], tl.float32)
    acc = tl.zeros([TILE_G, TILE_D], tl.float32)
    for start in range(first, last, TILE_N):
        n = start + tl.arange(0, TILE_N)
        keep = n < last
        page, inside = _pages_of(tables_ptr + b * tables_b, tables_t, start, n, keep, P, S, TILE_N)
        mask = keep[:, None] & (d[None, :] < D)
        k = tl.load(k_ptr + (page * k_p + n % S * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + (page * v_p + n % S * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if soft_cap is not None:
            s = _soft_capped(s, soft_cap)
        s = s * LOG2E + tl.where(keep, tl.where(inside, 0.0, float("nan")), float("-inf"))[None, :]
        new_maximum = tl.maximum(maximum, tl.max(s, 1))
        p = tl.exp2(s - new_maximum[:, None])
        rescale = tl.exp2(maximum - new_maximum)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        maximum = new_maximum
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not SPLIT:
        out = tl.where(valid, out, float("nan"))
    head = kv * G + g
    out_at = out_ptr + b * out_b + head[:, None] * out_h + c * out_c + d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=heads)
    if SPLIT:
        tl.store(lse_ptr + (b * K * G + head) * splits + c, maximum + tl.log2(total), mask=g < G)


@triton.jit
def combine_kernel(
    splits_ptr, lse_ptr, lens_ptr, out_ptr, lens_b, H, capacity, split, splits,
    D: tl.constexpr, TILE_D: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """Store out (B, H, D): the splits (B, H, C, D), weighted by their shares of the total sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    length, valid = _clamped_length(lens_ptr + row // H * lens_b, capacity)
    used = tl.cdiv(length, split)
    d = tl.arange(0, TILE_D)
    c = tl.arange(0, TILE_C)
    maximum = float("-inf")
    for first in range(0, used, TILE_C):
        lse = tl.load(lse_ptr + row * splits + first + c, mask=first + c < used, other=float("-inf"))
        maximum = tl.maximum(maximum, tl.max(lse, 0))
    total = 0.0
    acc = tl.zeros([TILE_D], tl.float32)
    for first in range(0, used, TILE_C):
        inside = first + c < used
        lse = tl.load(lse_ptr + row * splits + first + c, mask=inside, other=float("-inf"))
        at = splits_ptr + (row * splits + first + c)[:, None] * D + d[None, :]
        values = tl.load(at, mask=inside[:, None] & (d[None, :] < D), other=0.0)
        weight = tl.exp2(lse - maximum)
        total += tl.sum(weight, 0)
        acc += tl.sum(values * weight[:, None], 0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    out = tl.where(valid, out, float("nan"))
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
