"""The backward pass of long sequences on Hopper: one kernel for dq and delta, and one for dk and dv.

FlashAttention-2 (Dao 2023, arXiv 2307.08691); see triton_flash/backward.py. In both kernels, dP = do vᵀ - delta starts
from -delta, in the accumulators of its product. For dk and dv, the scores start from -lse in units of q kᵀ likewise.

Shape suffixes: N query tokens, M key tokens, D head dim, padded to 64 or 128.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from vitkernels.attention.triton_flash.hopper.warpgroups import (
    ROWS,
    begin_load,
    columns_of,
    new_barrier,
    new_ring,
    operand_layout,
    owned_rows,
    product_layout,
    publish_barriers,
    release,
    rows_of_head,
    run_warpgroups,
    store_rows,
    wait_until_full,
)
from vitkernels.attention.triton_flash.tiles import LOG2E

# Ranges of a tile's columns: dq's product with the first runs while the scores' gradient of the next is computed.
_RANGES = gl.constexpr(2)


# --- dq ---------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_keys(call, WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load the queries and do of all consumers, and then the tiles of keys and values, the last first."""
    descriptors, _, tiles_in_memory, barriers, place, _ = call
    q_desc, do_desc, k_desc, v_desc = descriptors
    own_full, ring = barriers
    b, h, first, _, _, M = place
    q_tiles, do_tiles, k_tiles, v_tiles = tiles_in_memory
    size: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(own_full, 2 * WARPGROUPS * ROWS * D * size)
    for i in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(q_desc, [b, h, first + i * ROWS, 0], own_full, q_tiles.index(i))
        tma.async_copy_global_to_shared(do_desc, [b, h, first + i * ROWS, 0], own_full, do_tiles.index(i))
    tiles = gl.cdiv(M, TILE)
    for i in range(tiles):
        m = (tiles - 1 - i) * TILE
        stage = begin_load(ring, i, STAGES, 2 * TILE * D * size)
        tma.async_copy_global_to_shared(k_desc, [b, h, m, 0], ring[0].index(stage), k_tiles.index(stage))
        tma.async_copy_global_to_shared(v_desc, [b, h, m, 0], ring[0].index(stage), v_tiles.index(stage))


@gluon.jit
def _add_to_dq(dq, q, do, k, v, lse, delta, keys, factor, TILE: gl.constexpr, D: gl.constexpr, MASKED: gl.constexpr):
    """Return dq plus the contribution of a tile. With MASKED, only its first `keys` rows exist."""
    scores_layout: gl.constexpr = product_layout(TILE)
    width: gl.constexpr = TILE // _RANGES
    zero = gl.zeros([ROWS, TILE], gl.float32, scores_layout)
    minus_delta = zero - delta[:, None]
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(do, v.permute((1, 0)), minus_delta, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    if MASKED:
        inside = gl.arange(0, TILE, gl.SliceLayout(0, scores_layout)) < keys
        s = gl.where(inside[None, :], s, float("-inf"))
    for i in gl.static_range(_RANGES):
        s_range = columns_of(s, i, _RANGES)
        p = gl.exp2(s_range * factor - gl.convert_layout(lse, gl.SliceLayout(1, s_range.type.layout))[:, None])
        if i == 0:
            dp = warpgroup_mma_wait(0, [dp])
        ds = gl.convert_layout((p * columns_of(dp, i, _RANGES)).to(k.dtype), operand_layout(D))
        dq = warpgroup_mma(ds, k.slice(i * width, width), dq, is_async=True)
    return warpgroup_mma_wait(0, [dq])


@gluon.jit
def _query_gradients(call, i: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Compute dq and delta of ROWS queries."""
    _, pointers, tiles_in_memory, barriers, place, numbers = call
    q_tiles, do_tiles, k_tiles, v_tiles = tiles_in_memory
    own_full, ring = barriers
    out_ptr, lse_ptr, delta_ptr, dq_ptr = pointers
    b, h, first, H, N, M = place
    out_strides, dq_strides, head_dim, scale = numbers
    scores_layout: gl.constexpr = product_layout(TILE)
    dq_layout: gl.constexpr = product_layout(D)
    factor = scale * LOG2E
    tiles = gl.cdiv(M, TILE)

    n = first + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, dq_layout))
    out_rows, inside = rows_of_head(out_ptr, b, h, n, N, out_strides, head_dim, D)
    out = gl.load(out_rows, mask=inside, other=0.0)
    statistics = (b * H + h).to(gl.int64) * N + n
    lse = gl.load(lse_ptr + statistics, mask=n < N, other=0.0)
    mbarrier.wait(own_full, 0)
    do = do_tiles.index(i).reshape([ROWS, D])
    delta = gl.sum(do.load(dq_layout).to(gl.float32) * out.to(gl.float32), 1)
    gl.store(delta_ptr + statistics, delta, mask=n < N)
    lse = gl.convert_layout(lse, gl.SliceLayout(1, scores_layout))
    delta = gl.convert_layout(delta, gl.SliceLayout(1, scores_layout))
    # Products with narrow tiles are bound by shared-memory bandwidth, so q and do are register operands.
    q = q_tiles.index(i).reshape([ROWS, D]).load(operand_layout(TILE))
    do = do.load(operand_layout(TILE))
    dq = gl.zeros([ROWS, D], gl.float32, dq_layout)

    stage = wait_until_full(ring, 0, STAGES)
    k, v = k_tiles.index(stage).reshape([TILE, D]), v_tiles.index(stage).reshape([TILE, D])
    dq = _add_to_dq(dq, q, do, k, v, lse, delta, M - (tiles - 1) * TILE, factor, TILE, D, True)
    release(ring, stage)
    for tile in range(1, tiles):
        stage = wait_until_full(ring, tile, STAGES)
        k, v = k_tiles.index(stage).reshape([TILE, D]), v_tiles.index(stage).reshape([TILE, D])
        dq = _add_to_dq(dq, q, do, k, v, lse, delta, TILE, factor, TILE, D, False)
        release(ring, stage)
    store_rows(dq_ptr, dq * scale, b, h, n, N, dq_strides, head_dim, D)


@gluon.jit(do_not_specialize=["H", "N", "M"])
def dq_kernel(
    q_desc, do_desc, k_desc, v_desc, out_ptr, lse_ptr, delta_ptr, dq_ptr,
    out_b, out_h, out_n, dq_b, dq_h, dq_n, H, N, M, head_dim, scale,
    WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dq, and delta_BHN for the dkdv kernel; see forward_kernel.

    Descriptors have blocks of ROWS queries or TILE keys.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(do_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], do_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, TILE, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, TILE, D], v_desc.layout)
    own_full = new_barrier()
    ring = new_ring(STAGES, WARPGROUPS)
    publish_barriers()
    # In reverse order of heads: the dkdv kernel begins with the heads that this kernel leaves in the L2 cache.
    b, h, first = owned_rows(gl.num_programs(0) - 1 - gl.program_id(0), N, H, WARPGROUPS)
    call = (
        (q_desc, do_desc, k_desc, v_desc), (out_ptr, lse_ptr, delta_ptr, dq_ptr), (q_tiles, do_tiles, k_tiles, v_tiles),
        (own_full, ring), (b, h, first, H, N, M), ((out_b, out_h, out_n), (dq_b, dq_h, dq_n), head_dim, scale),
    )  # fmt: skip
    run_warpgroups(_query_gradients, _load_keys, call, WARPGROUPS, TILE, D, STAGES)


# --- dk and dv --------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_queries(call, WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load the keys and values of all consumers, and then the tiles of queries and do, with their lse and delta."""
    descriptors, pointers, tiles_in_memory, barriers, place, numbers = call
    k_desc, v_desc, q_desc, do_desc = descriptors
    own_full, ring = barriers
    _, _, _, scale = numbers
    k_tiles, v_tiles, q_tiles, do_tiles, s_starts, dp_starts = tiles_in_memory
    lse_ptr, delta_ptr, _, _ = pointers
    b, h, first, H, N, _ = place
    size: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(own_full, 2 * WARPGROUPS * ROWS * D * size)
    for i in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(k_desc, [b, h, first + i * ROWS, 0], own_full, k_tiles.index(i))
        tma.async_copy_global_to_shared(v_desc, [b, h, first + i * ROWS, 0], own_full, v_tiles.index(i))
    # TMA cannot copy lse and delta: if N is odd, rows start at unaligned addresses. The warp loads them, a tile ahead.
    n = gl.arange(0, TILE, gl.BlockedLayout([TILE // 32], [32], [1], [0]))
    lse_ptr += (b * H + h).to(gl.int64) * N
    delta_ptr += (b * H + h).to(gl.int64) * N
    lse = gl.load(lse_ptr + n, mask=n < N, other=0.0)
    delta = gl.load(delta_ptr + n, mask=n < N, other=0.0)
    for i in range(gl.cdiv(N, TILE)):
        stage = begin_load(ring, i, STAGES, 2 * TILE * D * size)
        tma.async_copy_global_to_shared(q_desc, [b, h, i * TILE, 0], ring[0].index(stage), q_tiles.index(stage))
        tma.async_copy_global_to_shared(do_desc, [b, h, i * TILE, 0], ring[0].index(stage), do_tiles.index(stage))
        s_starts.index(stage).store(lse * (-1.0 / (scale * LOG2E)))
        dp_starts.index(stage).store(-delta)
        mbarrier.arrive(ring[0].index(stage), count=1)
        n += TILE
        lse = gl.load(lse_ptr + n, mask=n < N, other=0.0)
        delta = gl.load(delta_ptr + n, mask=n < N, other=0.0)


@gluon.jit
def _key_gradients(call, i: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Compute dk and dv of ROWS keys, from transposed tiles: keys are rows, and queries columns.

    Queries beyond the last are zeros, as are their starts: they add nothing.
    """
    _, pointers, tiles_in_memory, barriers, place, numbers = call
    own_full, ring = barriers
    dk_strides, dv_strides, head_dim, scale = numbers
    k_tiles, v_tiles, q_tiles, do_tiles, s_starts, dp_starts = tiles_in_memory
    _, _, dk_ptr, dv_ptr = pointers
    b, h, first, _, N, M = place
    scores_layout: gl.constexpr = product_layout(TILE)
    columns_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    factor = scale * LOG2E
    mbarrier.wait(own_full, 0)
    k, v = k_tiles.index(i).reshape([ROWS, D]), v_tiles.index(i).reshape([ROWS, D])
    dk = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    dv = gl.zeros([ROWS, D], gl.float32, product_layout(D))
    for tile in range(gl.cdiv(N, TILE)):
        stage = wait_until_full(ring, tile, STAGES)
        q, do = q_tiles.index(stage).reshape([TILE, D]), do_tiles.index(stage).reshape([TILE, D])
        s = s_starts.index(stage).load(columns_layout)[None, :].broadcast_to([ROWS, TILE])
        dp = dp_starts.index(stage).load(columns_layout)[None, :].broadcast_to([ROWS, TILE])
        # This wait returns at once: no products are in flight. It keeps the writes to both accumulators ahead of both
        # products; ptxas serializes products with a write between them (C7517).
        s, dp = warpgroup_mma_wait(0, [s, dp])
        s = warpgroup_mma(k, q.permute((1, 0)), s, is_async=True)
        dp = warpgroup_mma(v, do.permute((1, 0)), dp, is_async=True)
        s = warpgroup_mma_wait(1, [s])
        p = gl.exp2(s * factor)
        dv = warpgroup_mma(gl.convert_layout(p.to(q.dtype), operand_layout(D)), do, dv, is_async=True)
        dp = warpgroup_mma_wait(1, [dp])
        ds = (p * dp).to(q.dtype)
        dk = warpgroup_mma(gl.convert_layout(ds, operand_layout(D)), q, dk, is_async=True)
        dk, dv = warpgroup_mma_wait(0, [dk, dv])
        release(ring, stage)
    m = first + i * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(D)))
    store_rows(dk_ptr, dk * scale, b, h, m, M, dk_strides, head_dim, D)
    store_rows(dv_ptr, dv, b, h, m, M, dv_strides, head_dim, D)


@gluon.jit(do_not_specialize=["H", "N", "M"])
def dkdv_kernel(
    k_desc, v_desc, q_desc, do_desc, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n, H, N, M, head_dim, scale,
    WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute dk and dv from delta_BHN; see forward_kernel. Descriptors have blocks of ROWS keys or TILE queries."""
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, 1, TILE, D], q_desc.layout)
    do_tiles = gl.allocate_shared_memory(do_desc.dtype, [STAGES, 1, 1, TILE, D], do_desc.layout)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    s_starts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    dp_starts = gl.allocate_shared_memory(gl.float32, [STAGES, TILE], plain)
    own_full = new_barrier()
    ring = new_ring(STAGES, WARPGROUPS, 2)
    publish_barriers()
    b, h, first = owned_rows(gl.program_id(0), M, H, WARPGROUPS)
    call = (
        (k_desc, v_desc, q_desc, do_desc), (lse_ptr, delta_ptr, dk_ptr, dv_ptr),
        (k_tiles, v_tiles, q_tiles, do_tiles, s_starts, dp_starts), (own_full, ring), (b, h, first, H, N, M),
        ((dk_b, dk_h, dk_n), (dv_b, dv_h, dv_n), head_dim, scale),
    )  # fmt: skip
    run_warpgroups(_key_gradients, _load_queries, call, WARPGROUPS, TILE, D, STAGES)
