"""Flash attention, forward: one program per head and tile of queries, looping over tiles of keys.

FlashAttention-2 (Dao 2023, arXiv 2307.08691): softmax online, normalised once at the end, its log-sum-exp kept for the
backward pass. The ragged ends (197 = 3 * 64 + 5) get tiles of their own, as small as the tensor cores allow, so that
an odd length costs close to its real work.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import triton
import triton.language as tl

from vitkernels.attention.triton_flash.tiles import (
    LOG2E,
    head_offset,
    inner,
    load_rows,
    modified_scores,
    outer,
    store_rows,
    zeros,
)


@triton.jit
def _fold_in(
    s, v1, v2, row_max, row_sum, acc1, acc2, scale, GENERAL: tl.constexpr, D2: tl.constexpr, PRECISION: tl.constexpr
):
    """Takes one more tile of scores and values into the running softmax."""
    if GENERAL:  # s is scaled already, and whole rows of it can be -inf
        new_max = tl.maximum(row_max, tl.max(s, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        p = tl.exp2(s - base[:, None])
    else:  # scaling after the maximum makes it part of the exponent's multiply-add
        new_max = tl.maximum(row_max, tl.max(s, 1) * scale)
        base = new_max
        p = tl.exp2(s * scale - base[:, None])
    shrink = tl.exp2(row_max - base)
    row_sum = row_sum * shrink + tl.sum(p, 1)
    acc1 = acc1 * shrink[:, None]
    if D2 > 0:
        acc2 = acc2 * shrink[:, None]
    acc1, acc2 = outer(p.to(v1.dtype), v1, v2, acc1, acc2, D2, PRECISION)
    return new_max, row_sum, acc1, acc2


@triton.jit
def _attend_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_n, k_m, v_m, out_n, bias_n, bias_m, mask_n, mask_m, segment_n,
    first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_M: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = first_n + tl.arange(0, TILE_N)
    q1, q2 = load_rows(q_ptr, n, q_n, N, D, D1, D2, RAGGED)
    row_max = tl.full([TILE_N], float("-inf"), tl.float32)
    row_sum = tl.zeros([TILE_N], tl.float32)
    acc1, acc2 = zeros(TILE_N, D1, D2)

    if GENERAL:
        end = M
        if CAUSAL:
            end = tl.minimum(M, first_n + TILE_N)
        for first_m in range(0, end, TILE_M):
            m = first_m + tl.arange(0, TILE_M)
            k1, k2 = load_rows(k_ptr, m, k_m, M, D, D1, D2, True)
            v1, v2 = load_rows(v_ptr, m, v_m, M, D, D1, D2, True)
            s = inner(q1, q2, k1, k2, D2, PRECISION) * scale
            s = modified_scores(
                s, n[:, None], m[None, :], N, M,
                bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n, CAUSAL,
            )  # fmt: skip
            row_max, row_sum, acc1, acc2 = _fold_in(
                s, v1, v2, row_max, row_sum, acc1, acc2, scale, GENERAL, D2, PRECISION
            )
    else:
        whole = M // TILE_M * TILE_M
        if TAIL_M > 0:  # loaded before the loop and used after it, so that nobody waits for it
            tail_m = whole + tl.arange(0, TAIL_M)
            tail_k1, tail_k2 = load_rows(k_ptr, tail_m, k_m, M, D, D1, D2, True)
            tail_v1, tail_v2 = load_rows(v_ptr, tail_m, v_m, M, D, D1, D2, True)
        for first_m in range(0, whole, TILE_M):
            m = first_m + tl.arange(0, TILE_M)
            k1, k2 = load_rows(k_ptr, m, k_m, M, D, D1, D2, False)
            v1, v2 = load_rows(v_ptr, m, v_m, M, D, D1, D2, False)
            s = inner(q1, q2, k1, k2, D2, PRECISION)
            row_max, row_sum, acc1, acc2 = _fold_in(
                s, v1, v2, row_max, row_sum, acc1, acc2, scale, GENERAL, D2, PRECISION
            )
        if TAIL_M > 0:
            s = inner(q1, q2, tail_k1, tail_k2, D2, PRECISION)
            s = tl.where(tail_m[None, :] < M, s, float("-inf"))
            row_max, row_sum, acc1, acc2 = _fold_in(
                s, tail_v1, tail_v2, row_max, row_sum, acc1, acc2, scale, GENERAL, D2, PRECISION
            )

    if GENERAL:  # a query without keys: zeros out, and +inf so that every exp2(score - lse) of the backward pass is 0
        row_max = tl.where(row_sum == 0.0, float("inf"), row_max)
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
    share = 1.0 / row_sum
    tl.store(lse_ptr + n, row_max + tl.log2(row_sum), mask=n < N)
    store_rows(out_ptr, acc1 * share[:, None], acc2 * share[:, None], n, out_n, N, D, D1, D2, RAGGED)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q kᵀ + bias) v and lse_BHN, the log-sum-exp in log2 units.

    Strides are in elements, those of q, k, v and out multiples of 8 and 1 along D. Tiles of one head follow each
    other, so that its keys and values come from the L2 cache. TAIL_N and TAIL_M are the tiles for what is left of N
    and M after the whole tiles; 0 when nothing is.
    """
    tiles = tl.cdiv(N, TILE_N)
    head = tl.program_id(0) // tiles
    first_n = tl.program_id(0) % tiles * TILE_N
    q_ptr += head_offset(head, H, q_b, q_h)
    k_ptr += head_offset(head, H, k_b, k_h)
    v_ptr += head_offset(head, H, v_b, v_h)
    out_ptr += head_offset(head, H, out_b, out_h)
    q_n = tl.multiple_of(q_n, 8)
    k_m = tl.multiple_of(k_m, 8)
    v_m = tl.multiple_of(v_m, 8)
    out_n = tl.multiple_of(out_n, 8)
    lse_ptr += head.to(tl.int64) * N
    b = (head // H).to(tl.int64)
    h = head % H
    if bias_ptr is not None:
        bias_ptr += b * bias_b + h * bias_h
    if mask_ptr is not None:
        mask_ptr += b * mask_b + h * mask_h
    if segment_ptr is not None:
        segment_ptr += b * segment_b
    scale_log2 = scale * LOG2E
    if TAIL_N == 0 or TAIL_N == TILE_N:
        _attend_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale_log2,
            D, D1, D2, TILE_N, TILE_M, TAIL_M, TAIL_N > 0, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    elif first_n + TILE_N > N:
        _attend_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale_log2,
            D, D1, D2, TAIL_N, TILE_M, TAIL_M, True, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    else:
        _attend_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale_log2,
            D, D1, D2, TILE_N, TILE_M, TAIL_M, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
