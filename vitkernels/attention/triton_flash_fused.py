"""Flash attention, backward in one pass for short sequences: one program per head makes dq, dk and dv.

Two kernels, one for dq and one for dk and dv, compute scores and weights twice: seven products instead of five. Here a
program takes the keys of its head tile by tile, and all queries for each. A tile's dk and dv stay in registers; dq
is carried from one tile of keys to the next in a float32 buffer that only this program touches, so no atomics are
needed and the sum has a fixed order. With few tiles of keys and enough heads to fill the GPU this costs less than the
second pass.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import triton
import triton.language as tl

from vitkernels.attention.triton_flash_tiles import (
    LOG2E,
    head_offset,
    inner,
    load_rows,
    outer,
    store_rows,
    zeros,
)


@triton.jit
def _dq_columns(ds, k, carry_ptr, dq_ptr, n, carry_n, dq_n, limit, scale,
    first: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    RAGGED: tl.constexpr, TURNED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    d = first + tl.arange(0, WIDTH)
    if TURNED:  # (D, queries): a tile of fewer than 64 queries can only be the right-hand side of a tensor core's tile
        n = n[None, :]
        d = d[:, None]
    else:
        n = n[:, None]
        d = d[None, :]
    inside = (n < limit) & (d < D)
    carry = carry_ptr + n * carry_n + d
    if FIRST:
        if TURNED:
            dq = tl.dot(tl.trans(k), ds, input_precision=PRECISION)
        else:
            dq = tl.dot(tl.trans(ds), k, input_precision=PRECISION)
    else:
        before = tl.load(carry, mask=n < limit, other=0.0) if RAGGED else tl.load(carry)
        if TURNED:
            dq = tl.dot(tl.trans(k), ds, before, input_precision=PRECISION)
        else:
            dq = tl.dot(tl.trans(ds), k, before, input_precision=PRECISION)
    if LAST:
        out = (dq * scale).to(dq_ptr.dtype.element_ty)
        if RAGGED or first + WIDTH > D:
            tl.store(dq_ptr + n * dq_n + d, out, mask=inside)
        else:
            tl.store(dq_ptr + n * dq_n + d, out)
    elif RAGGED:
        tl.store(carry, dq, mask=n < limit)
    else:
        tl.store(carry, dq)


@triton.jit
def _queries(
    k1, k2, v1, v2, dk1, dk2, dv1, dv2,
    q_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, carry_ptr, q_n, out_n, do_n, dq_n, carry_n,
    first_n, m, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr,
    FIRST: tl.constexpr, LAST: tl.constexpr, RAGGED: tl.constexpr, RAGGED_M: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries against one tile of keys: adds to dk and dv, and to the carried dq."""
    n = first_n + tl.arange(0, TILE_N)
    q1, q2 = load_rows(q_ptr, n, q_n, N, D, D1, D2, RAGGED)
    do1, do2 = load_rows(do_ptr, n, do_n, N, D, D1, D2, RAGGED)
    # +inf makes the weights of a query past the end 0.
    lse = tl.load(lse_ptr + n, mask=n < N, other=float("inf")) if RAGGED else tl.load(lse_ptr + n)
    if FIRST:
        out1, out2 = load_rows(out_ptr, n, out_n, N, D, D1, D2, RAGGED)
        delta = tl.sum(do1.to(tl.float32) * out1.to(tl.float32), 1)
        if D2 > 0:
            delta += tl.sum(do2.to(tl.float32) * out2.to(tl.float32), 1)
        if not LAST:
            tl.store(delta_ptr + n, delta, mask=n < N)
    elif RAGGED:
        delta = tl.load(delta_ptr + n, mask=n < N, other=0.0)
    else:
        delta = tl.load(delta_ptr + n)
    s = inner(k1, k2, q1, q2, D2, PRECISION)
    s = s * (scale * LOG2E)
    if RAGGED_M:
        s = tl.where(m[:, None] < M, s, float("-inf"))
    p = tl.exp2(s - lse[None, :])
    dv1, dv2 = outer(p.to(do1.dtype), do1, do2, dv1, dv2, D2, PRECISION)
    ds = (p * (inner(v1, v2, do1, do2, D2, PRECISION) - delta[None, :])).to(q1.dtype)
    dk1, dk2 = outer(ds, q1, q2, dk1, dk2, D2, PRECISION)
    _dq_columns(
        ds, k1, carry_ptr, dq_ptr, n, carry_n, dq_n, N, scale,
        0, D1, D, FIRST, LAST, RAGGED, TILE_N < 64, PRECISION,
    )  # fmt: skip
    if D2 > 0:
        _dq_columns(
            ds, k2, carry_ptr, dq_ptr, n, carry_n, dq_n, N, scale,
            D1, D2, D, FIRST, LAST, RAGGED, TILE_N < 64, PRECISION,
        )  # fmt: skip
    return dk1, dk2, dv1, dv2


@triton.jit
def _keys(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, carry_ptr,
    q_n, k_m, v_m, out_n, do_n, dq_n, dk_m, dv_m, carry_n,
    first_m, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys against all queries."""
    m = first_m + tl.arange(0, TILE_M)
    k1, k2 = load_rows(k_ptr, m, k_m, M, D, D1, D2, RAGGED)
    v1, v2 = load_rows(v_ptr, m, v_m, M, D, D1, D2, RAGGED)
    dk1, dk2 = zeros(TILE_M, D1, D2)
    dv1, dv2 = zeros(TILE_M, D1, D2)
    whole = N // TILE_N * TILE_N
    for first_n in range(0, whole, TILE_N):
        dk1, dk2, dv1, dv2 = _queries(
            k1, k2, v1, v2, dk1, dk2, dv1, dv2,
            q_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, carry_ptr, q_n, out_n, do_n, dq_n, carry_n,
            first_n, m, N, M, scale, D, D1, D2, TILE_N, FIRST, LAST, False, RAGGED, PRECISION,
        )  # fmt: skip
    if TAIL_N > 0:
        dk1, dk2, dv1, dv2 = _queries(
            k1, k2, v1, v2, dk1, dk2, dv1, dv2,
            q_ptr, out_ptr, do_ptr, dq_ptr, lse_ptr, delta_ptr, carry_ptr, q_n, out_n, do_n, dq_n, carry_n,
            whole, m, N, M, scale, D, D1, D2, TAIL_N, FIRST, LAST, True, RAGGED, PRECISION,
        )  # fmt: skip
    store_rows(dk_ptr, dk1 * scale, dk2 * scale, m, dk_m, M, D, D1, D2, RAGGED)
    store_rows(dv_ptr, dv1, dv2, m, dv_m, M, D, D1, D2, RAGGED)


@triton.jit
def fused_backward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, carry_ptr,
    q_b, q_h, q_n, k_b, k_h, k_m, v_b, v_h, v_m, out_b, out_h, out_n, do_b, do_h, do_n,
    dq_b, dq_h, dq_n, dk_b, dk_h, dk_m, dv_b, dv_h, dv_m,
    H, N, M, scale,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, TILE_N: tl.constexpr, TILE_M: tl.constexpr,
    TAIL_N: tl.constexpr, LAST_M: tl.constexpr, ONE_TILE: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dv of one head per program; neither bias nor masks. See forward_kernel for strides.

    The keys are tiles of TILE_M and a last one of LAST_M, RAGGED when M ends inside it; ONE_TILE: the last is the only.
    carry (B * H, N, D1 + D2) and delta (B * H, N), float32, are this kernel's own notes between tiles of keys.
    """
    head = tl.program_id(0)
    q_ptr += head_offset(head, H, q_b, q_h)
    k_ptr += head_offset(head, H, k_b, k_h)
    v_ptr += head_offset(head, H, v_b, v_h)
    out_ptr += head_offset(head, H, out_b, out_h)
    do_ptr += head_offset(head, H, do_b, do_h)
    dq_ptr += head_offset(head, H, dq_b, dq_h)
    dk_ptr += head_offset(head, H, dk_b, dk_h)
    dv_ptr += head_offset(head, H, dv_b, dv_h)
    q_n = tl.multiple_of(q_n, 8)
    k_m = tl.multiple_of(k_m, 8)
    v_m = tl.multiple_of(v_m, 8)
    out_n = tl.multiple_of(out_n, 8)
    do_n = tl.multiple_of(do_n, 8)
    dq_n = tl.multiple_of(dq_n, 8)
    dk_m = tl.multiple_of(dk_m, 8)
    dv_m = tl.multiple_of(dv_m, 8)
    lse_ptr += head.to(tl.int64) * N
    delta_ptr += head.to(tl.int64) * N
    carry_n: tl.constexpr = D1 + D2
    carry_ptr += head.to(tl.int64) * N * carry_n
    last_m = (tl.cdiv(M, TILE_M) - 1) * TILE_M
    if not ONE_TILE:
        _keys(
            q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, carry_ptr,
            q_n, k_m, v_m, out_n, do_n, dq_n, dk_m, dv_m, carry_n, 0, N, M, scale,
            D, D1, D2, TILE_N, TILE_M, TAIL_N, True, False, False, PRECISION,
        )  # fmt: skip
        for first_m in range(TILE_M, last_m, TILE_M):
            tl.debug_barrier()  # what one thread has carried, another may read
            _keys(
                q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, carry_ptr,
                q_n, k_m, v_m, out_n, do_n, dq_n, dk_m, dv_m, carry_n, first_m, N, M, scale,
                D, D1, D2, TILE_N, TILE_M, TAIL_N, False, False, False, PRECISION,
            )  # fmt: skip
        tl.debug_barrier()
    _keys(
        q_ptr, k_ptr, v_ptr, out_ptr, do_ptr, dq_ptr, dk_ptr, dv_ptr, lse_ptr, delta_ptr, carry_ptr,
        q_n, k_m, v_m, out_n, do_n, dq_n, dk_m, dv_m, carry_n, last_m, N, M, scale,
        D, D1, D2, TILE_N, LAST_M, TAIL_N, ONE_TILE, True, RAGGED, PRECISION,
    )  # fmt: skip
