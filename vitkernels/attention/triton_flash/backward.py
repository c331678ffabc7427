"""Flash attention, backward: one kernel for dq, one for dk and dv, one for the gradient of a bias.

FlashAttention-2 (Dao 2023, arXiv 2307.08691). The weights p are computed again from the scores and the forward pass's
log-sum-exp. With delta = rowsum(dout * out), the scores' gradient is ds = p * (dout vᵀ - delta). The dq kernel reads
dout and out anyway and leaves delta for the others, so it runs first. Each program owns what it writes: no atomics,
and so the same bits in every run.

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
def _add_to_dq(
    q1, q2, do1, do2, k1, k2, v1, v2, lse, delta, dq1, dq2, n, m, N, M, scale,
    bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
    D2: tl.constexpr, MASKED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    s = inner(q1, q2, k1, k2, D2, PRECISION) * scale
    if GENERAL:
        s = modified_scores(
            s, n[:, None], m[None, :], N, M,
            bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n, CAUSAL,
        )  # fmt: skip
    elif MASKED:
        s = tl.where(m[None, :] < M, s, float("-inf"))
    p = tl.exp2(s - lse[:, None])
    ds = p * (inner(do1, do2, v1, v2, D2, PRECISION) - delta[:, None])
    return outer(ds.to(k1.dtype), k1, k2, dq1, dq2, D2, PRECISION)


@triton.jit
def _dq_rows(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_n, k_m, v_m, out_n, do_n, dq_n, bias_n, bias_m, mask_n, mask_m, segment_n,
    first_n, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_M: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    n = first_n + tl.arange(0, TILE_N)
    q1, q2 = load_rows(q_ptr, n, q_n, N, D, D1, D2, RAGGED)
    do1, do2 = load_rows(do_ptr, n, do_n, N, D, D1, D2, RAGGED)
    out1, out2 = load_rows(out_ptr, n, out_n, N, D, D1, D2, RAGGED)
    delta = tl.sum(do1.to(tl.float32) * out1.to(tl.float32), 1)
    if D2 > 0:
        delta += tl.sum(do2.to(tl.float32) * out2.to(tl.float32), 1)
    tl.store(delta_ptr + n, delta, mask=n < N)
    lse = tl.load(lse_ptr + n, mask=n < N, other=float("inf"))
    dq1, dq2 = zeros(TILE_N, D1, D2)
    scale_log2 = scale * LOG2E

    whole = M // TILE_M * TILE_M
    if GENERAL:
        whole = M
        if CAUSAL:
            whole = tl.minimum(M, first_n + TILE_N)
    if TAIL_M > 0:  # loaded before the loop and used after it, so that nobody waits for it
        tail_m = whole + tl.arange(0, TAIL_M)
        tail_k1, tail_k2 = load_rows(k_ptr, tail_m, k_m, M, D, D1, D2, True)
        tail_v1, tail_v2 = load_rows(v_ptr, tail_m, v_m, M, D, D1, D2, True)
    for first_m in range(0, whole, TILE_M):
        m = first_m + tl.arange(0, TILE_M)
        k1, k2 = load_rows(k_ptr, m, k_m, M, D, D1, D2, GENERAL)
        v1, v2 = load_rows(v_ptr, m, v_m, M, D, D1, D2, GENERAL)
        dq1, dq2 = _add_to_dq(
            q1, q2, do1, do2, k1, k2, v1, v2, lse, delta, dq1, dq2, n, m, N, M, scale_log2,
            bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
            D2, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    if TAIL_M > 0:
        dq1, dq2 = _add_to_dq(
            q1, q2, do1, do2, tail_k1, tail_k2, tail_v1, tail_v2, lse, delta, dq1, dq2, n, tail_m, N, M, scale_log2,
            bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
            D2, True, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    store_rows(dq_ptr, dq1 * scale, dq2 * scale, n, dq_n, N, D, D1, D2, RAGGED)


@triton.jit
def dq_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n, do_b, do_h, do_n, dq_b, dq_h, dq_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, and delta_BHN for the other kernels; one program per head and tile of queries. See forward_kernel."""
    tiles = tl.cdiv(N, TILE_N)
    # Backwards through the heads: the forward pass left the last in the L2 cache, and this leaves the first for dkdv.
    program = tl.num_programs(0) - 1 - tl.program_id(0)
    head = program // tiles
    first_n = program % tiles * TILE_N
    q_ptr += head_offset(head, H, q_b, q_h)
    k_ptr += head_offset(head, H, k_b, k_h)
    v_ptr += head_offset(head, H, v_b, v_h)
    out_ptr += head_offset(head, H, out_b, out_h)
    do_ptr += head_offset(head, H, do_b, do_h)
    dq_ptr += head_offset(head, H, dq_b, dq_h)
    q_n = tl.multiple_of(q_n, 8)
    k_m = tl.multiple_of(k_m, 8)
    v_m = tl.multiple_of(v_m, 8)
    out_n = tl.multiple_of(out_n, 8)
    do_n = tl.multiple_of(do_n, 8)
    dq_n = tl.multiple_of(dq_n, 8)
    lse_ptr += head.to(tl.int64) * N
    delta_ptr += head.to(tl.int64) * N
    b = (head // H).to(tl.int64)
    h = head % H
    if bias_ptr is not None:
        bias_ptr += b * bias_b + h * bias_h
    if mask_ptr is not None:
        mask_ptr += b * mask_b + h * mask_h
    if segment_ptr is not None:
        segment_ptr += b * segment_b
    if TAIL_N == 0 or TAIL_N == TILE_N:
        _dq_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, do_n, dq_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale,
            D, D1, D2, TILE_N, TILE_M, TAIL_M, TAIL_N > 0, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    elif first_n + TILE_N > N:
        _dq_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, do_n, dq_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale,
            D, D1, D2, TAIL_N, TILE_M, TAIL_M, True, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    else:
        _dq_rows(
            q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, out_n, do_n, dq_n, bias_n, bias_m, mask_n, mask_m, segment_n, first_n, N, M, scale,
            D, D1, D2, TILE_N, TILE_M, TAIL_M, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip


@triton.jit
def _add_to_dkdv(
    q1, q2, do1, do2, k1, k2, v1, v2, lse, delta, dk1, dk2, dv1, dv2, n, m, N, M, scale,
    bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
    D2: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # Transposed, (keys, queries): then p and ds are the left operands that the tensor cores take from registers.
    # Queries past the end have lse = +inf and so p = 0; keys past the end fill rows that are never stored.
    s = inner(k1, k2, q1, q2, D2, PRECISION) * scale
    if GENERAL:
        s = modified_scores(
            s, n[None, :], m[:, None], N, M,
            bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n, CAUSAL,
        )  # fmt: skip
    p = tl.exp2(s - lse[None, :])
    dv1, dv2 = outer(p.to(do1.dtype), do1, do2, dv1, dv2, D2, PRECISION)
    ds = p * (inner(v1, v2, do1, do2, D2, PRECISION) - delta[None, :])
    dk1, dk2 = outer(ds.to(q1.dtype), q1, q2, dk1, dk2, D2, PRECISION)
    return dk1, dk2, dv1, dv2


@triton.jit
def _dkdv_rows(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_n, k_m, v_m, do_n, dk_m, dv_m, bias_n, bias_m, mask_n, mask_m, segment_n,
    first_m, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, RAGGED: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    m = first_m + tl.arange(0, TILE_M)
    k1, k2 = load_rows(k_ptr, m, k_m, M, D, D1, D2, RAGGED)
    v1, v2 = load_rows(v_ptr, m, v_m, M, D, D1, D2, RAGGED)
    dk1, dk2 = zeros(TILE_M, D1, D2)
    dv1, dv2 = zeros(TILE_M, D1, D2)
    scale_log2 = scale * LOG2E

    start = 0
    whole = N // TILE_N * TILE_N
    if GENERAL:
        whole = N
        if CAUSAL:
            start = first_m // TILE_N * TILE_N
    if TAIL_N > 0:  # loaded before the loop and used after it, so that nobody waits for it
        tail_n = whole + tl.arange(0, TAIL_N)
        tail_q1, tail_q2 = load_rows(q_ptr, tail_n, q_n, N, D, D1, D2, True)
        tail_do1, tail_do2 = load_rows(do_ptr, tail_n, do_n, N, D, D1, D2, True)
        tail_lse = tl.load(lse_ptr + tail_n, mask=tail_n < N, other=float("inf"))
        tail_delta = tl.load(delta_ptr + tail_n, mask=tail_n < N, other=0.0)
    for first_n in range(start, whole, TILE_N):
        n = first_n + tl.arange(0, TILE_N)
        q1, q2 = load_rows(q_ptr, n, q_n, N, D, D1, D2, GENERAL)
        do1, do2 = load_rows(do_ptr, n, do_n, N, D, D1, D2, GENERAL)
        if GENERAL:
            lse = tl.load(lse_ptr + n, mask=n < N, other=float("inf"))
            delta = tl.load(delta_ptr + n, mask=n < N, other=0.0)
        else:
            lse = tl.load(lse_ptr + n)
            delta = tl.load(delta_ptr + n)
        dk1, dk2, dv1, dv2 = _add_to_dkdv(
            q1, q2, do1, do2, k1, k2, v1, v2, lse, delta, dk1, dk2, dv1, dv2, n, m, N, M, scale_log2,
            bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
            D2, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    if TAIL_N > 0:
        dk1, dk2, dv1, dv2 = _add_to_dkdv(
            tail_q1, tail_q2, tail_do1, tail_do2, k1, k2, v1, v2, tail_lse, tail_delta, dk1, dk2, dv1, dv2,
            tail_n, m, N, M, scale_log2, bias_ptr, bias_n, bias_m, mask_ptr, mask_n, mask_m, segment_ptr, segment_n,
            D2, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    store_rows(dk_ptr, dk1 * scale, dk2 * scale, m, dk_m, M, D, D1, D2, RAGGED)
    store_rows(dv_ptr, dv1, dv2, m, dv_m, M, D, D1, D2, RAGGED)


@triton.jit
def dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, TAIL_M: tl.constexpr, GENERAL: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv; one program per head and tile of keys. Needs the dq kernel's delta. See forward_kernel."""
    tiles = tl.cdiv(M, TILE_M)
    head = tl.program_id(0) // tiles
    first_m = tl.program_id(0) % tiles * TILE_M
    q_ptr += head_offset(head, H, q_b, q_h)
    k_ptr += head_offset(head, H, k_b, k_h)
    v_ptr += head_offset(head, H, v_b, v_h)
    do_ptr += head_offset(head, H, do_b, do_h)
    dk_ptr += head_offset(head, H, dk_b, dk_h)
    dv_ptr += head_offset(head, H, dv_b, dv_h)
    q_n = tl.multiple_of(q_n, 8)
    k_m = tl.multiple_of(k_m, 8)
    v_m = tl.multiple_of(v_m, 8)
    do_n = tl.multiple_of(do_n, 8)
    dk_m = tl.multiple_of(dk_m, 8)
    dv_m = tl.multiple_of(dv_m, 8)
    lse_ptr += head.to(tl.int64) * N
    delta_ptr += head.to(tl.int64) * N
    b = (head // H).to(tl.int64)
    h = head % H
    if bias_ptr is not None:
        bias_ptr += b * bias_b + h * bias_h
    if mask_ptr is not None:
        mask_ptr += b * mask_b + h * mask_h
    if segment_ptr is not None:
        segment_ptr += b * segment_b
    if TAIL_M == 0 or TAIL_M == TILE_M:
        _dkdv_rows(
            q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, do_n, dk_m, dv_m, bias_n, bias_m, mask_n, mask_m, segment_n, first_m, N, M, scale,
            D, D1, D2, TILE_N, TILE_M, TAIL_N, TAIL_M > 0, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    elif first_m + TILE_M > M:
        _dkdv_rows(
            q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, do_n, dk_m, dv_m, bias_n, bias_m, mask_n, mask_m, segment_n, first_m, N, M, scale,
            D, D1, D2, TILE_N, TAIL_M, TAIL_N, True, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip
    else:
        _dkdv_rows(
            q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
            q_n, k_m, v_m, do_n, dk_m, dv_m, bias_n, bias_m, mask_n, mask_m, segment_n, first_m, N, M, scale,
            D, D1, D2, TILE_N, TILE_M, TAIL_N, False, GENERAL, CAUSAL, PRECISION,
        )  # fmt: skip


@triton.jit
def dbias_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dbias_ptr, lse_ptr, delta_ptr, bias_ptr, mask_ptr, segment_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, do_b, do_h, do_n,
    bias_b, bias_h, bias_n, bias_m, mask_b, mask_h, mask_n, mask_m, segment_b, segment_n,
    B, H, N, M, bias_heads, batch_step, head_step, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dbias (batch or 1, heads or 1, N, M), contiguous: one program per tile of it sums over what it was broadcast to.

    batch_step and head_step: how far apart the batch entries and heads are that share one bias; B and H for "none do".
    """
    tiles_m = tl.cdiv(M, TILE_M)
    tiles = tl.cdiv(N, TILE_N) * tiles_m
    owner = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    n = tile // tiles_m * TILE_N + tl.arange(0, TILE_N)
    m = tile % tiles_m * TILE_M + tl.arange(0, TILE_M)
    q_n = tl.multiple_of(q_n, 8)
    k_m = tl.multiple_of(k_m, 8)
    v_m = tl.multiple_of(v_m, 8)
    do_n = tl.multiple_of(do_n, 8)
    total = tl.zeros([TILE_N, TILE_M], tl.float32)
    for b in range(owner // bias_heads, B, batch_step):
        for h in range(owner % bias_heads, H, head_step):
            head = b * H + h
            q1, q2 = load_rows(q_ptr + head_offset(head, H, q_b, q_h), n, q_n, N, D, D1, D2, True)
            k1, k2 = load_rows(k_ptr + head_offset(head, H, k_b, k_h), m, k_m, M, D, D1, D2, True)
            v1, v2 = load_rows(v_ptr + head_offset(head, H, v_b, v_h), m, v_m, M, D, D1, D2, True)
            do1, do2 = load_rows(do_ptr + head_offset(head, H, do_b, do_h), n, do_n, N, D, D1, D2, True)
            row = tl.cast(head, tl.int64) * N + n
            lse = tl.load(lse_ptr + row, mask=n < N, other=float("inf"))
            delta = tl.load(delta_ptr + row, mask=n < N, other=0.0)
            mask_here = mask_ptr
            if mask_ptr is not None:
                mask_here = mask_ptr + (tl.cast(b, tl.int64) * mask_b + h * mask_h)
            segments_here = segment_ptr
            if segment_ptr is not None:
                segments_here = segment_ptr + tl.cast(b, tl.int64) * segment_b
            s = inner(q1, q2, k1, k2, D2, PRECISION) * (scale * LOG2E)
            s = modified_scores(
                s, n[:, None], m[None, :], N, M,
                bias_ptr + (tl.cast(b, tl.int64) * bias_b + h * bias_h), bias_n, bias_m,
                mask_here, mask_n, mask_m, segments_here, segment_n, CAUSAL,
            )  # fmt: skip
            p = tl.exp2(s - lse[:, None])
            total += p * (inner(do1, do2, v1, v2, D2, PRECISION) - delta[:, None])
    at = dbias_ptr + tl.cast(owner, tl.int64) * N * M + n[:, None] * M + m[None, :]
    tl.store(at, total, mask=(n[:, None] < N) & (m[None, :] < M))
