"""Flash attention, backward: one kernel for dq, and one for dk and dv.

FlashAttention-2 (Dao 2023, arXiv 2307.08691). The kernels recompute the weights p from the scores and the forward
pass's log-sum-exp. With delta = rowsum(dout * out), the scores' gradient is ds = p * (dout vᵀ - delta). The dq kernel
reads dout and out anyway and writes delta for the other kernel, so it runs first. If a bias needs a gradient, the dq
kernel also stores ds, which bias_gradient.py sums. Each program owns its outputs: without atomics, every run gives the
same bits.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import triton
import triton.language as tl

from vitkernels.attention.triton_flash.tiles import (
    full_rows,
    inner,
    keys_in_reach,
    load_rows,
    load_statistics,
    modified_scores,
    outer,
    owned_rows,
    owned_tile,
    queries_in_reach,
    row_length,
    rows_from,
    rows_of_head,
    score_factor,
    statistics_of_head,
    store_rows,
    store_scores,
    weights_of,
    zeros,
)


@triton.jit
def _add_to_dq(
    q1, q2, do1, do2, k1, k2, v1, v2, base, log_sum, delta, dq1, dq2, ds_ptr, n, m, N, M, scale, extras,
    D2: tl.constexpr, MASKED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    s = inner(q1, q2, k1, k2, D2, PRECISION)
    if GENERAL:
        s = modified_scores(s, scale, n[:, None], m[None, :], N, M, extras, CAUSAL)
    elif MASKED:
        s = tl.where(m[None, :] < M, s, float("-inf"))
    p = weights_of(s, scale, base[:, None], log_sum[:, None], extras)
    ds = (p * (inner(do1, do2, v1, v2, D2, PRECISION) - delta[:, None])).to(k1.dtype)
    if ds_ptr is not None:
        store_scores(ds_ptr, ds, n[:, None], m[None, :], N, M)
    return outer(ds, k1, k2, dq1, dq2, D2, PRECISION)


@triton.jit
def _dq_rows(
    q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_M: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = first_n + tl.arange(0, TILE_N)
    q1, q2 = load_rows(q, n, N, D, D1, D2, RAGGED)
    do1, do2 = load_rows(do, n, N, D, D1, D2, RAGGED)
    out1, out2 = load_rows(out, n, N, D, D1, D2, RAGGED)
    delta = tl.sum(do1.to(tl.float32) * out1.to(tl.float32), 1)
    if D2 > 0:
        delta += tl.sum(do2.to(tl.float32) * out2.to(tl.float32), 1)
    tl.store(delta_ptr + n, delta, mask=n < N)
    base, log_sum = load_statistics(lse_ptr, n, N, extras, True)
    dq1, dq2 = zeros(TILE_N, D1, D2)
    factor = score_factor(scale, extras)

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
        dq1, dq2 = _add_to_dq(
            q1, q2, do1, do2, k1, k2, v1, v2, base, log_sum, delta, dq1, dq2, ds_ptr, n, m, N, M, factor, extras,
            D2, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    if TAIL_M > 0:
        dq1, dq2 = _add_to_dq(
            q1, q2, do1, do2, tail_k1, tail_k2, tail_v1, tail_v2, base, log_sum, delta, dq1, dq2, ds_ptr,
            n, tail_m, N, M, factor, extras, D2, True, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    store_rows(dq, dq1 * scale, dq2 * scale, n, N, D, D1, D2, RAGGED)


@triton.jit
def _dq_tile(
    q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_M: tl.constexpr,
    RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq of the rows first_n to N; see _attend_tile."""
    if TAIL_N == 0 or TAIL_N == TILE_N:
        _dq_rows(q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first_n, N, M, scale,
                 D, D1, D2, TILE_N, TILE_M, TAIL_M, TAIL_N > 0, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    elif N - first_n <= TAIL_N:
        _dq_rows(q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first_n, N, M, scale,
                 D, D1, D2, TAIL_N, TILE_M, TAIL_M, True, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    else:
        _dq_rows(q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first_n, N, M, scale,
                 D, D1, D2, TILE_N, TILE_M, TAIL_M, RAGGED, GENERAL, CAUSAL, PRECISION)  # fmt: skip


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, ds_ptr,
    bias_ptr, mask_ptr, segment_ptr, table_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    tiles, H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dq, and delta_BHN for the dkdv kernel; one program per head and tile of queries. See forward_kernel.

    Unless ds_ptr is None, store ds of all visited tiles, (B, H, N, row_length(M)); not with table_ptr.
    """
    # In reverse order of heads: the forward pass left the last heads in the L2 cache, and this leaves the first for
    # the dkdv kernel.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    if table_ptr is None:
        head, first = owned_tile(program, N, TILE_N)
    else:
        head, first, end, start, compares = owned_rows(program, table_ptr, tiles, H)
    q = rows_of_head(q_ptr, head, H, q_b, q_h, q_n)
    k = rows_of_head(k_ptr, head, H, k_b, k_h, k_m)
    v = rows_of_head(v_ptr, head, H, v_b, v_h, v_m)
    out = rows_of_head(out_ptr, head, H, out_b, out_h, out_n)
    do = rows_of_head(do_ptr, head, H, do_b, do_h, do_n)
    dq = rows_of_head(dq_ptr, head, H, dq_b, dq_h, dq_n)
    delta_ptr += head.to(tl.int64) * N
    if ds_ptr is not None:
        ds_ptr += head.to(tl.int64) * N * row_length(M)
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    extras = (
        bias_ptr, b * bias_b + h * bias_h, bias_n, bias_m,
        mask_ptr, b * mask_b + h * mask_h, mask_n, mask_m, segment_ptr, b * segment_b, segment_n,
    )  # fmt: skip
    lse_ptr = statistics_of_head(lse_ptr, head, N, extras)
    if table_ptr is None:
        _dq_tile(q, k, v, out, do, dq, lse_ptr, delta_ptr, ds_ptr, extras, first, N, M, scale,
                 D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, False, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    elif first < end:
        if compares:
            _dq_rows(q, k, v, out, do, dq, lse_ptr, delta_ptr, None, extras, first, end, M, scale,
                     D, D1, D2, TILE_N, TILE_M, 0, True, True, CAUSAL, PRECISION)  # fmt: skip
        else:
            _dq_tile(
                rows_from(q, start), rows_from(k, start), rows_from(v, start), rows_from(out, start),
                rows_from(do, start), rows_from(dq, start), lse_ptr + start, delta_ptr + start, None,
                extras, first - start, end - start, end - start, scale,
                D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, True, GENERAL, CAUSAL, PRECISION,
            )  # fmt: skip


@triton.jit
def _add_to_dkdv(
    q1, q2, do1, do2, k1, k2, v1, v2, base, log_sum, delta, dk1, dk2, dv1, dv2, n, m, N, M, scale, extras,
    D2: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Transposed, (keys, queries): p and ds are then the left operands, which the tensor cores read from registers.
    # Queries past the end have lse = +inf and so p = 0; keys past the end fill rows that are never stored.
    s = inner(k1, k2, q1, q2, D2, PRECISION)
    if GENERAL:
        s = modified_scores(s, scale, n[None, :], m[:, None], N, M, extras, CAUSAL)
    p = weights_of(s, scale, base[None, :], log_sum[None, :], extras)
    dv1, dv2 = outer(p.to(do1.dtype), do1, do2, dv1, dv2, D2, PRECISION)
    ds = p * (inner(v1, v2, do1, do2, D2, PRECISION) - delta[None, :])
    dk1, dk2 = outer(ds.to(q1.dtype), q1, q2, dk1, dk2, D2, PRECISION)
    return dk1, dk2, dv1, dv2


@triton.jit
def _dkdv_rows(
    q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first_m, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = first_m + tl.arange(0, TILE_M)
    k1, k2 = load_rows(k, m, M, D, D1, D2, RAGGED)
    v1, v2 = load_rows(v, m, M, D, D1, D2, RAGGED)
    dk1, dk2 = zeros(TILE_M, D1, D2)
    dv1, dv2 = zeros(TILE_M, D1, D2)
    factor = score_factor(scale, extras)

    start = 0
    reach = N
    full = full_rows(N, TILE_N, TAIL_N)
    end = full
    if GENERAL:
        start, reach = queries_in_reach(extras, m, first_m, N, M, TILE_N, CAUSAL)
        end = tl.minimum(reach, full)
    if TAIL_N > 0:  # loaded before the loop and used after it, to hide the latency
        tail_n = full + tl.arange(0, TAIL_N)
        tail_q1, tail_q2 = load_rows(q, tail_n, N, D, D1, D2, True)
        tail_do1, tail_do2 = load_rows(do, tail_n, N, D, D1, D2, True)
        tail_base, tail_log_sum = load_statistics(lse_ptr, tail_n, N, extras, True)
        tail_delta = tl.load(delta_ptr + tail_n, mask=tail_n < N, other=0.0)
    for first_n in range(start, end, TILE_N):
        n = first_n + tl.arange(0, TILE_N)
        q1, q2 = load_rows(q, n, N, D, D1, D2, False)
        do1, do2 = load_rows(do, n, N, D, D1, D2, False)
        base, log_sum = load_statistics(lse_ptr, n, N, extras, False)
        delta = tl.load(delta_ptr + n)
        dk1, dk2, dv1, dv2 = _add_to_dkdv(
            q1, q2, do1, do2, k1, k2, v1, v2, base, log_sum, delta, dk1, dk2, dv1, dv2, n, m, N, M, factor, extras,
            D2, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    has_tail = reach > full if GENERAL else TAIL_N > 0
    if TAIL_N > 0:  # noqa: SIM102 - Triton evaluates both operands of `and`
        if has_tail:
            dk1, dk2, dv1, dv2 = _add_to_dkdv(
                tail_q1, tail_q2, tail_do1, tail_do2, k1, k2, v1, v2, tail_base, tail_log_sum, tail_delta,
                dk1, dk2, dv1, dv2, tail_n, m, N, M, factor, extras, D2, GENERAL, CAUSAL, PRECISION,
            )  # fmt: skip
    store_rows(dk, dk1 * scale, dk2 * scale, m, M, D, D1, D2, RAGGED)
    store_rows(dv, dv1, dv2, m, M, D, D1, D2, RAGGED)


@triton.jit
def _dkdv_tile(
    q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first_m, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr, TAIL_N: tl.constexpr, TAIL_M: tl.constexpr,
    RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv of the rows first_m to M; see _attend_tile."""
    if TAIL_M == 0 or TAIL_M == TILE_M:
        _dkdv_rows(q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first_m, N, M, scale,
                   D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M > 0, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    elif M - first_m <= TAIL_M:
        _dkdv_rows(q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first_m, N, M, scale,
                   D, D1, D2, TILE_N, TAIL_M, TAIL_N, True, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    else:
        _dkdv_rows(q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first_m, N, M, scale,
                   D, D1, D2, TILE_N, TILE_M, TAIL_N, RAGGED, GENERAL, CAUSAL, PRECISION)  # fmt: skip


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr,
    bias_ptr, mask_ptr, segment_ptr, table_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    tiles, H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr,
    TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dk and dv; one program per head and tile of keys. Needs the dq kernel's delta. See forward_kernel."""
    if table_ptr is None:
        head, first = owned_tile(tl.program_id(0), M, TILE_M)
    else:
        head, first, end, start, compares = owned_rows(tl.program_id(0), table_ptr, tiles, H)
    q = rows_of_head(q_ptr, head, H, q_b, q_h, q_n)
    k = rows_of_head(k_ptr, head, H, k_b, k_h, k_m)
    v = rows_of_head(v_ptr, head, H, v_b, v_h, v_m)
    do = rows_of_head(do_ptr, head, H, do_b, do_h, do_n)
    dk = rows_of_head(dk_ptr, head, H, dk_b, dk_h, dk_m)
    dv = rows_of_head(dv_ptr, head, H, dv_b, dv_h, dv_m)
    delta_ptr += head.to(tl.int64) * N
    b, h = (head // H).to(tl.int64), (head % H).to(tl.int64)
    extras = (
        bias_ptr, b * bias_b + h * bias_h, bias_n, bias_m,
        mask_ptr, b * mask_b + h * mask_h, mask_n, mask_m, segment_ptr, b * segment_b, segment_n,
    )  # fmt: skip
    lse_ptr = statistics_of_head(lse_ptr, head, N, extras)
    if table_ptr is None:
        _dkdv_tile(q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first, N, M, scale,
                   D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, False, GENERAL, CAUSAL, PRECISION)  # fmt: skip
    elif first < end:
        if compares:
            _dkdv_rows(q, k, v, do, dk, dv, lse_ptr, delta_ptr, extras, first, N, end, scale,
                       D, D1, D2, TILE_N, TILE_M, TILE_N, True, True, CAUSAL, PRECISION)  # fmt: skip
        else:
            _dkdv_tile(
                rows_from(q, start), rows_from(k, start), rows_from(v, start), rows_from(do, start),
                rows_from(dk, start), rows_from(dv, start), lse_ptr + start, delta_ptr + start,
                extras, first - start, end - start, end - start, scale,
                D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M, True, GENERAL, CAUSAL, PRECISION,
            )  # fmt: skip
