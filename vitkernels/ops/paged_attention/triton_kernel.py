"""The device code: attention of one query token per sequence over parts of its pages, and the parts' combination.

Flash-Decoding (Dao et al. 2023, https://pytorch.org/blog/flash-decoding/): a sequence is cut into parts, each with a
softmax of its own, so that a small batch fills the GPU; parts are of equal length, so that ragged batches balance.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one, D head dim, P pages, S tokens per
page, T pages per sequence, N tokens of a tile, C parts.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _length_of(lens_ptr, capacity):
    """Tokens of a sequence, cut to what its table can hold; whether nothing had to be cut."""
    length = tl.load(lens_ptr)
    fits = (length >= 0) & (length <= capacity)
    return tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32), fits


@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, lens_ptr, tables_ptr, out_ptr, lse_ptr,
    q_b, q_h, q_d, k_k, k_p, k_s, v_k, v_p, v_s, lens_b, tables_b, tables_t, out_b, out_h, out_c,
    K, P, capacity, part, parts, soft_cap,
    G: tl.constexpr, TILE_G: tl.constexpr, D: tl.constexpr, TILE_D: tl.constexpr, S: tl.constexpr,
    TILE_N: tl.constexpr, SPLIT: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """One part of one sequence for a tile of the query heads of one key head; its log-sum-exp in log2 units.

    part: tokens of a part, a multiple of TILE_N. parts: those of the longest sequence; SPLIT: more than one, else there
    is no log-sum-exp. Programs that read the same keys and values follow each other, so that they share a cache.
    A token whose page is outside the cache scores NaN, and so makes the sequence's result NaN.
    """
    program = tl.program_id(0)
    tiles: tl.constexpr = (G + TILE_G - 1) // TILE_G
    g = program % tiles * TILE_G + tl.arange(0, TILE_G)
    c = program // tiles % parts
    kv = program // tiles // parts % K
    b = (program // tiles // parts // K).to(tl.int64)
    if ALIGNED:
        k_p, k_s = tl.multiple_of(k_p, 8), tl.multiple_of(k_s, 8)
        v_p, v_s = tl.multiple_of(v_p, 8), tl.multiple_of(v_s, 8)
        k_k, v_k = tl.multiple_of(k_k, 8), tl.multiple_of(v_k, 8)
    length, fits = _length_of(lens_ptr + b * lens_b, capacity)
    first = c * part
    last = tl.minimum(length, first + part)
    if SPLIT and first >= length:
        return
    d = tl.arange(0, TILE_D)
    q_at = q_ptr + b * q_b + (kv * G + g)[:, None] * q_h + d[None, :] * q_d
    q = tl.load(q_at, mask=(g[:, None] < G) & (d[None, :] < D), other=0.0)
    table_ptr = tables_ptr + b * tables_b
    k_ptr += kv.to(tl.int64) * k_k
    v_ptr += kv.to(tl.int64) * v_k

    top = tl.full([TILE_G], float("-inf"), tl.float32)
    total = tl.zeros([TILE_G], tl.float32)
    acc = tl.zeros([TILE_G, TILE_D], tl.float32)
    for start in range(first, last, TILE_N):
        n = start + tl.arange(0, TILE_N)
        keep = n < last
        if S % TILE_N == 0:  # the whole tile lies in one page
            page = tl.load(table_ptr + start // S * tables_t)
        else:
            page = tl.load(table_ptr + n // S * tables_t, mask=keep, other=0)
        inside = (page >= 0) & (page < P)
        page = tl.where(inside, page, 0).to(tl.int64)
        mask = keep[:, None] & (d[None, :] < D)
        k = tl.load(k_ptr + (page * k_p + n % S * k_s)[:, None] + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_ptr + (page * v_p + n % S * v_s)[:, None] + d[None, :], mask=mask, other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee")
        if soft_cap is not None:
            fade = tl.exp2(tl.abs(s) * (-2.0 * LOG2E / soft_cap))
            s = tl.where(s < 0, -soft_cap, soft_cap) * ((1.0 - fade) / (1.0 + fade))  # soft_cap tanh(s / soft_cap)
        verdict = tl.where(keep, tl.where(inside, 0.0, float("nan")), float("-inf"))
        s = s * LOG2E + verdict[None, :]
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    if not SPLIT:
        out = tl.where(fits, out, float("nan"))
    head = kv * G + g
    out_at = out_ptr + b * out_b + head[:, None] * out_h + c * out_c + d[None, :]
    tl.store(out_at, out.to(out_ptr.dtype.element_ty), mask=(g[:, None] < G) & (d[None, :] < D))
    if SPLIT:
        tl.store(lse_ptr + (b * K * G + head) * parts + c, top + tl.log2(total), mask=g < G)


@triton.jit
def combine_kernel(
    parts_ptr, lse_ptr, lens_ptr, out_ptr, lens_b, H, capacity, part, parts,
    D: tl.constexpr, TILE_D: tl.constexpr, TILE_C: tl.constexpr,
):  # fmt: skip
    """out (B, H, D) from the parts (B, H, C, D), each weighed by its share of the whole sum of exponentials."""
    row = tl.program_id(0).to(tl.int64)
    length, fits = _length_of(lens_ptr + row // H * lens_b, capacity)
    used = tl.cdiv(length, part)
    d = tl.arange(0, TILE_D)
    c = tl.arange(0, TILE_C)
    top = float("-inf")
    for first in range(0, used, TILE_C):
        lse = tl.load(lse_ptr + row * parts + first + c, mask=first + c < used, other=float("-inf"))
        top = tl.maximum(top, tl.max(lse, 0))
    total = 0.0
    acc = tl.zeros([TILE_D], tl.float32)
    for first in range(0, used, TILE_C):
        there = first + c < used
        lse = tl.load(lse_ptr + row * parts + first + c, mask=there, other=float("-inf"))
        at = parts_ptr + (row * parts + first + c)[:, None] * D + d[None, :]
        values = tl.load(at, mask=there[:, None] & (d[None, :] < D), other=0.0)
        weight = tl.exp2(lse - top)
        total += tl.sum(weight, 0)
        acc += tl.sum(values * weight[:, None], 0)
    out = acc / tl.where(total == 0.0, 1.0, total)
    out = tl.where(fits, out, float("nan"))
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=d < D)
