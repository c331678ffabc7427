"""Flash attention for short sequences: all tokens of a head in one tile, such as the 49 of a window.

A program owns one head in a run of consecutive batch entries. Over its run it keeps the bias, and the sum of the bias's
gradient, in registers, and it prefetches the next entry. The softmax needs no running maximum. One backward kernel
computes the scores once, and writes dq, dk, dv and dbias. It uses no atomics, so repeated calls give the same bits.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import triton
import triton.language as tl

from vitkernels.attention.triton_flash.tiles import (
    exponential,
    inner,
    load_bias,
    load_mask,
    load_rows,
    load_statistics,
    outer,
    rows_of_entry,
    score_factor,
    statistics_of_head,
    store_rows,
    store_statistics,
    weights_of,
    zeros,
)


@triton.jit
def _added_scores(n, m, N, M, extras, CAUSAL: tl.constexpr):
    """Return what is added to the scores of every entry of a run: the bias, or -inf where a query must not attend."""
    inside = (n[:, None] < N) & (m[None, :] < M)
    added = tl.zeros([n.shape[0], m.shape[0]], tl.float32)
    if extras[0] is not None:
        added = load_bias(n[:, None], m[None, :], N, M, extras)
    if CAUSAL:
        inside = inside & (n[:, None] >= m[None, :])
    return tl.where(inside, added, float("-inf"))


@triton.jit
def _hidden(s, n, m, N, M, extras):
    """Return the scores with -inf where mask or segments of this entry hide a key."""
    segment_ptr, segment_at, segment_n = extras[8], extras[9], extras[10]
    if extras[4] is not None:
        s = tl.where(load_mask(n[:, None], m[None, :], N, M, extras), s, float("-inf"))
    if segment_ptr is not None:
        # One element per thread. With fewer elements, each thread would load the ids of its own 16 keys.
        WIDE: tl.constexpr = 128
        wide = tl.arange(0, WIDE)
        ids = tl.load(segment_ptr + segment_at + wide * segment_n, mask=wide < N, other=0)
        ids = tl.sum(tl.reshape(ids, (WIDE // n.shape[0], n.shape[0])), 0)
        s = tl.where(ids[:, None] == ids[None, :], s, float("-inf"))
    return s


@triton.jit
def single_tile_forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, bias_ptr, mask_ptr, segment_ptr, table_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n, tiles, H, N, M, scale, B, run,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and lse as `forward_kernel` does; one program per head and run of batch entries.

    Consecutive programs own the heads of one run, whose rows are neighbors in memory.
    """
    h, first = tl.program_id(0) % H, tl.program_id(0) // H * run
    n, m = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    of_bias = bias_ptr, tl.cast(first, tl.int64) * bias_b + h * bias_h, bias_n, bias_m
    added = _added_scores(n, m, N, M, of_bias, CAUSAL)
    factor = score_factor(scale, of_bias)
    for i in range(first, tl.minimum(first + run, B)):
        b = tl.cast(i, tl.int64)
        extras = (
            bias_ptr, b * bias_b + h * bias_h, bias_n, bias_m,
            mask_ptr, b * mask_b + h * mask_h, mask_n, mask_m, segment_ptr, b * segment_b, segment_n,
        )  # fmt: skip
        q1, q2 = load_rows(rows_of_entry(q_ptr, b, h, q_b, q_h, q_n), n, N, D, D1, D2, True)
        k1, k2 = load_rows(rows_of_entry(k_ptr, b, h, k_b, k_h, k_m), m, M, D, D1, D2, True)
        v1, v2 = load_rows(rows_of_entry(v_ptr, b, h, v_b, v_h, v_m), m, M, D, D1, D2, True)
        s = _hidden(inner(q1, q2, k1, k2, D2, PRECISION) * factor + added, n, m, N, M, extras)
        row_max = tl.max(s, 1)
        base = tl.where(row_max == float("-inf"), 0.0, row_max)
        p = exponential(s - base[:, None], extras)
        row_sum = tl.sum(p, 1)
        acc1, acc2 = zeros(TILE_N, D1, D2)
        acc1, acc2 = outer(p.to(v1.dtype), v1, v2, acc1, acc2, D2, PRECISION)
        # A query without keys: out is 0, and lse = +inf makes its weights 0 in the backward pass.
        row_max = tl.where(row_sum == 0.0, float("inf"), row_max)
        row_sum = tl.where(row_sum == 0.0, 1.0, row_sum)
        share = 1.0 / row_sum
        store_statistics(statistics_of_head(lse_ptr, b * H + h, N, extras), row_max, row_sum, n, N, extras)
        out = rows_of_entry(out_ptr, b, h, out_b, out_h, out_n)
        store_rows(out, acc1 * share[:, None], acc2 * share[:, None], n, N, D, D1, D2, True)


@triton.jit
def single_tile_backward_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, partial_ptr,
    bias_ptr, mask_ptr, segment_ptr, table_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n, dq_b, dq_h, dq_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    tiles, H, N, M, scale, B, run, columns,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, dk, dv and, unless partial_ptr is None, a partial sum of dbias (runs, H, N, columns) for each run.

    delta = rowsum(dout * out) is the mean of each row of dout vᵀ under the attention weights. The tile holds entire
    rows, so the kernel need not read out. Programs are those of `single_tile_forward_kernel`.
    """
    h, first = tl.program_id(0) % H, tl.program_id(0) // H * run
    n, m = tl.arange(0, TILE_N), tl.arange(0, TILE_M)
    of_bias = bias_ptr, tl.cast(first, tl.int64) * bias_b + h * bias_h, bias_n, bias_m
    added = _added_scores(n, m, N, M, of_bias, CAUSAL)
    factor = score_factor(scale, of_bias)
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    for i in range(first, tl.minimum(first + run, B)):
        b = tl.cast(i, tl.int64)
        extras = (
            bias_ptr, b * bias_b + h * bias_h, bias_n, bias_m,
            mask_ptr, b * mask_b + h * mask_h, mask_n, mask_m, segment_ptr, b * segment_b, segment_n,
        )  # fmt: skip
        q1, q2 = load_rows(rows_of_entry(q_ptr, b, h, q_b, q_h, q_n), n, N, D, D1, D2, True)
        k1, k2 = load_rows(rows_of_entry(k_ptr, b, h, k_b, k_h, k_m), m, M, D, D1, D2, True)
        v1, v2 = load_rows(rows_of_entry(v_ptr, b, h, v_b, v_h, v_m), m, M, D, D1, D2, True)
        do1, do2 = load_rows(rows_of_entry(do_ptr, b, h, do_b, do_h, do_n), n, N, D, D1, D2, True)
        base, log_sum = load_statistics(statistics_of_head(lse_ptr, b * H + h, N, extras), n, N, extras, True)
        s = inner(q1, q2, k1, k2, D2, PRECISION)
        dp = inner(do1, do2, v1, v2, D2, PRECISION)  # before s is used, so that both products run at once
        s = _hidden(s * factor + added, n, m, N, M, extras)
        p = weights_of(s, 1.0, base[:, None], log_sum[:, None], extras)
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        if partial_ptr is not None:
            total += ds
        w = ds.to(q1.dtype)
        dv1, dv2 = zeros(TILE_M, D1, D2)
        dv1, dv2 = outer(tl.trans(p.to(do1.dtype)), do1, do2, dv1, dv2, D2, PRECISION)
        store_rows(rows_of_entry(dv_ptr, b, h, dv_b, dv_h, dv_m), dv1, dv2, m, M, D, D1, D2, True)
        dk1, dk2 = zeros(TILE_M, D1, D2)
        dk1, dk2 = outer(tl.trans(w), q1, q2, dk1, dk2, D2, PRECISION)
        store_rows(rows_of_entry(dk_ptr, b, h, dk_b, dk_h, dk_m), dk1 * scale, dk2 * scale, m, M, D, D1, D2, True)
        dq1, dq2 = zeros(TILE_N, D1, D2)
        dq1, dq2 = outer(w, k1, k2, dq1, dq2, D2, PRECISION)
        store_rows(rows_of_entry(dq_ptr, b, h, dq_b, dq_h, dq_n), dq1 * scale, dq2 * scale, n, N, D, D1, D2, True)
    if partial_ptr is not None:
        at = partial_ptr + tl.cast(tl.program_id(0), tl.int64) * N * columns + n[:, None] * columns + m[None, :]
        tl.store(at, total, mask=(n[:, None] < N) & (m[None, :] < columns))
