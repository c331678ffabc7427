"""Flash attention, forward: one program per head and tile of queries, looping over tiles of keys.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): online softmax, normalized once at the end; its log-sum-exp is kept for
the backward pass. Ragged ends (197 = 3 * 64 + 5) get separate tiles, as small as the tensor cores allow, so that an
odd length costs little more than its useful work.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import triton
import triton.language as tl

from vitkernels.attention.triton_flash.tiles import (
    exponential,
    full_rows,
    inner,
    keys_in_reach,
    largest_score,
    load_rows,
    modified_scores,
    outer,
    owned_rows,
    owned_tile,
    rows_from,
    rows_of_head,
    score_factor,
    statistics_of_head,
    store_rows,
    store_statistics,
    weights_of,
    zeros,
)


@triton.jit
def _fold_in(
    s, v1, v2, row_max, row_sum, acc1, acc2, scale, extras,
    GENERAL: tl.constexpr, D2: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Fold one more tile of scores and values into the online softmax."""
    new_max = tl.maximum(row_max, largest_score(s, scale, extras))
    base = new_max
    if GENERAL:  # entire rows can be -inf
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    p = weights_of(s, scale, base[:, None], 0.0, extras)
    shrink = exponential(row_max - base, extras)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc1 = acc1 * shrink[:, None]
    if D2 > 0:
        acc2 = acc2 * shrink[:, None]
    acc1, acc2 = outer(p.to(v1.dtype), v1, v2, acc1, acc2, D2, PRECISION)
    return new_max, row_sum, acc1, acc2


@triton.jit
def _attend_rows(
    q, k, v, out, lse_ptr, extras, first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_M: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = first_n + tl.arange(0, TILE_N)
    q1, q2 = load_rows(q, n, N, D, D1, D2, RAGGED)
    row_max = tl.full([TILE_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_N], tl.float32)
    acc1, acc2 = zeros(TILE_N, D1, D2)

    start = 0
    end = full_rows(M, TILE_M, TAIL_M)
    if GENERAL:
        start, end = keys_in_reach(extras, n, first_n, N, M, TILE_M, CAUSAL)
    if TAIL_M > 0:  # loaded before the loop and used after it, to hide the latency
        tail_m = end + tl.arange(0, TAIL_M)
        tail_k1, tail_k2 = load_rows(k, tail_m, M, D, D1, D2, True)
        tail_v1, tail_v2 = load_rows(v, tail_m, M, D, D1, D2, True)
    for first_m in range(start, end, TILE_M):
        m = first_m + tl.arange(0, TILE_M)
        k1, k2 = load_rows(k, m, M, D, D1, D2, GENERAL)
        v1, v2 = load_rows(v, m, M, D, D1, D2, GENERAL)
        s = inner(q1, q2, k1, k2, D2, PRECISION)
        if GENERAL:
            s = modified_scores(s, scale, n[:, None], m[None, :], N, M, extras, CAUSAL)
        row_max, row_sum, acc1, acc2 = _fold_in(
            s, v1, v2, row_max, row_sum, acc1, acc2, scale, extras, GENERAL, D2, PRECISION
        )
    if TAIL_M > 0:
        s = inner(q1, q2, tail_k1, tail_k2, D2, PRECISION)
        s = tl.where(tail_m[None, :] < M, s, float("-inf"))
        row_max, row_sum, acc1, acc2 = _fold_in(
            s, tail_v1, tail_v2, row_max, row_sum, acc1, acc2, scale, extras, GENERAL, D2, PRECISION
        )

    if GENERAL:  # a query without keys: out is 0, and lse = +inf makes every exp2(score - lse) of the backward pass 0
        row_max = tl.where(row_sum == 0.0, float("inf"), row_max)
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    share = 1.0 / row_sum
    store_statistics(lse_ptr, row_max, row_sum, n, N, extras)
    store_rows(out, acc1 * share[:, None], acc2 * share[:, None], n, N, D, D1, D2, RAGGED)


@triton.jit
def _attend_tile(
    q, k, v, out, lse_ptr, extras, first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_M: tl.constexpr,
    RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from the rows first_n to N, at most TILE_N. Without RAGGED, they are TILE_N or at most TAIL_N."""
    if TAIL_N == 0 or TAIL_N == TILE_N:
        _attend_rows(q, k, v, out, lse_ptr, extras, first_n, N, M, scale,
                     D, D1, D2, TILE_N, TILE_M, TAIL_M, TAIL_N > 0, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    elif N - first_n <= TAIL_N:
        _attend_rows(q, k, v, out, lse_ptr, extras, first_n, N, M, scale,
                     D, D1, D2, TAIL_N, TILE_M, TAIL_M, True, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    else:
        _attend_rows(q, k, v, out, lse_ptr, extras, first_n, N, M, scale,
                     D, D1, D2, TILE_N, TILE_M, TAIL_M, RAGGED, GENERAL, CAUSAL, PRECISION)  # fmt: skip


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    bias_ptr, mask_ptr, segment_ptr, table_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n, tiles, H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out = softmax(scale * q kᵀ + bias) v, and lse_BHN, the log-sum-exp in log2 units.

    With a bias, lse is (B, H, 2, N): the maximum of the scores, and log2 of the sum of their exponentials beyond it.

    Strides are in elements; those of q, k, v and out are multiples of 8, and 1 along D. Tiles of one head run in
    consecutive programs, so that its keys and values stay in the L2 cache. TAIL_N and TAIL_M are the tile sizes for the
    remainder of N and M after full tiles; 0 if tiles cover all. `launch.py` chooses them.

    With table_ptr, programs own the tiles of `segment_tiles`, `tiles` in each batch entry. A segment is computed like a
    call of its own: pointers begin at its first row, and N and M are its length.
    """
    if table_ptr is None:
        head, first = owned_tile(tl.program_id(0), N, TILE_N)
    else:
        head, first, end, start, compares = owned_rows(tl.program_id(0), table_ptr, tiles, H)
    q = rows_of_head(q_ptr, head, H, q_b, q_h, q_n)
    k = rows_of_head(k_ptr, head, H, k_b, k_h, k_m)
    v = rows_of_head(v_ptr, head, H, v_b, v_h, v_m)
    out = rows_of_head(out_ptr, head, H, out_b, out_h, out_n)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    extras = (
        bias_ptr, b * bias_b + h * bias_h, bias_n, bias_m,
        mask_ptr, b * mask_b + h * mask_h, mask_n, mask_m, segment_ptr, b * segment_b, segment_n,
    )  # fmt: skip
    lse_ptr = statistics_of_head(lse_ptr, head, N, extras)
    factor = score_factor(scale, extras)
    if table_ptr is None:
        _attend_tile(
            q, k, v, out, lse_ptr, extras, first, N, M, factor,
            D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    elif first < end:
        if compares:
            _attend_rows(q, k, v, out, lse_ptr, extras, first, end, M, factor,
                         D, D1, D2, TILE_N, TILE_M, 0, True, True, CAUSAL, PRECISION)  # fmt: skip
        else:
            _attend_tile(
                rows_from(q, start), rows_from(k, start), rows_from(v, start), rows_from(out, start), lse_ptr + start,
                extras, first - start, end - start, end - start, factor,
                D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, True, GENERAL, CAUSAL, PRECISION,
            )  # fmt: skip
