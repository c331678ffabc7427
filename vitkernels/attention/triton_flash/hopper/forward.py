"""The forward pass of long sequences on Hopper. A program owns queries of one head, and tiles of keys stream by.

FlashAttention-3 (Shah et al. 2024, arXiv 2407.08608, section 3.2): a warpgroup issues the next tile's scores, then
the product of the values of the tile before, and computes the next weights meanwhile. The last tile comes first, so
that the loop has no masks.

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
    pin,
    product_layout,
    publish_barriers,
    release,
    run_warpgroups,
    store_rows,
    sums_per_thread,
    wait_until_full,
)


@gluon.jit
def _load(call, WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Load the queries of all consumers, and then the tiles of keys and values, the last first."""
    descriptors, _, tiles_in_memory, barriers, place, _ = call
    q_desc, k_desc, v_desc = descriptors
    q_tiles, k_tiles, v_tiles = tiles_in_memory
    q_full, k_ring, v_ring = barriers
    b, h, first, _, _, M = place
    size: gl.constexpr = q_desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(q_full, WARPGROUPS * ROWS * D * size)
    for i in gl.static_range(WARPGROUPS):
        tma.async_copy_global_to_shared(q_desc, [b, h, first + i * ROWS, 0], q_full, q_tiles.index(i))
    tiles = gl.cdiv(M, TILE)
    for i in range(tiles):
        m = (tiles - 1 - i) * TILE
        stage = begin_load(k_ring, i, STAGES, TILE * D * size)
        tma.async_copy_global_to_shared(k_desc, [b, h, m, 0], k_ring[0].index(stage), k_tiles.index(stage))
        begin_load(v_ring, i, STAGES, TILE * D * size)
        tma.async_copy_global_to_shared(v_desc, [b, h, m, 0], v_ring[0].index(stage), v_tiles.index(stage))


@gluon.jit
def _with_sums_of(p, row_sums, D: gl.constexpr):
    """Return row_sums plus those of the weights p, of which enough are computed before the next wait for products."""
    layout: gl.constexpr = row_sums.type.layout
    if D == 64:
        row_sums = pin(row_sums + sums_per_thread(p))
    else:  # the product with v takes twice as long as the weights, so it is enough to pin the first quarter
        row_sums = pin(row_sums + gl.convert_layout(sums_per_thread(columns_of(p, 0, 4)), layout))
        for i in gl.static_range(1, 4):
            row_sums += gl.convert_layout(sums_per_thread(columns_of(p, i, 4)), layout)
    return row_sums


@gluon.jit
def _attend(call, i: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    """Attend from ROWS queries to all keys."""
    _, outputs, tiles_in_memory, barriers, place, numbers = call
    out_ptr, lse_ptr = outputs
    q_tiles, k_tiles, v_tiles = tiles_in_memory
    q_full, k_ring, v_ring = barriers
    b, h, first, H, N, M = place
    out_strides, head_dim, factor = numbers
    scores_layout: gl.constexpr = product_layout(TILE)
    out_layout: gl.constexpr = product_layout(D)
    out_rows: gl.constexpr = gl.SliceLayout(1, out_layout)
    tiles = gl.cdiv(M, TILE)
    zero = gl.zeros([ROWS, TILE], gl.float32, scores_layout)
    acc = gl.zeros([ROWS, D], gl.float32, out_layout)

    mbarrier.wait(q_full, 0)
    q = q_tiles.index(i).reshape([ROWS, D])
    stage = wait_until_full(k_ring, 0, STAGES)
    k = k_tiles.index(stage).reshape([TILE, D]).permute((1, 0))
    s = warpgroup_mma_wait(0, [warpgroup_mma(q, k, zero, use_acc=False, is_async=True)])
    release(k_ring, stage)
    m = (tiles - 1) * TILE + gl.arange(0, TILE, gl.SliceLayout(0, scores_layout))
    s = gl.where((m < M)[None, :], s, float("-inf"))
    row_max = gl.max(s, 1) * factor
    p = gl.exp2(s * factor - row_max[:, None])
    row_sums = sums_per_thread(p)
    sums_layout: gl.constexpr = row_sums.type.layout
    operand = gl.convert_layout(p.to(k_tiles.dtype), operand_layout(D))
    for tile in range(1, tiles):
        before = stage
        stage = wait_until_full(k_ring, tile, STAGES)
        k = k_tiles.index(stage).reshape([TILE, D]).permute((1, 0))
        s_token = warpgroup_mma(q, k, zero, use_acc=False, is_async=True)
        wait_until_full(v_ring, tile - 1, STAGES)
        acc_token = warpgroup_mma(operand, v_tiles.index(before).reshape([TILE, D]), acc, is_async=True)
        s = warpgroup_mma_wait(1, [s_token])
        release(k_ring, stage)
        new_max = gl.maximum(row_max, gl.max(s, 1) * factor)
        shrink = gl.exp2(row_max - new_max)
        row_max = new_max
        p = gl.exp2(s * factor - row_max[:, None])
        row_sums *= gl.convert_layout(shrink, gl.SliceLayout(1, sums_layout))[:, None]
        row_sums = _with_sums_of(p, row_sums, D)
        acc = warpgroup_mma_wait(0, [acc_token])
        release(v_ring, before)
        acc *= gl.convert_layout(shrink, out_rows)[:, None]
        operand = gl.convert_layout(p.to(k_tiles.dtype), operand_layout(D))
    wait_until_full(v_ring, tiles - 1, STAGES)
    acc = warpgroup_mma(operand, v_tiles.index(stage).reshape([TILE, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, [acc])

    row_sum = gl.convert_layout(gl.sum(row_sums, 1), out_rows)
    n = first + i * ROWS + gl.arange(0, ROWS, out_rows)
    lse = gl.convert_layout(row_max, out_rows) + gl.log2(row_sum)
    gl.store(lse_ptr + (b * H + h).to(gl.int64) * N + n, lse, mask=n < N)
    store_rows(out_ptr, acc * (1.0 / row_sum)[:, None], b, h, n, N, out_strides, head_dim, D)


@gluon.jit(do_not_specialize=["H", "N", "M"])
def forward_kernel(
    q_desc, k_desc, v_desc, out_ptr, lse_ptr, out_b, out_h, out_n, H, N, M, head_dim, factor,
    WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute out = softmax(scale * q kᵀ) v, and lse_BHN, the log-sum-exp in log2 units.

    Descriptors are of (B, H, tokens, D) tensors, with blocks of ROWS queries or TILE keys. Strides are in elements.
    factor is scale * log2(e), and positive.
    """
    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [WARPGROUPS, 1, 1, ROWS, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, 1, TILE, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, 1, TILE, D], v_desc.layout)
    q_full = new_barrier()
    k_ring = new_ring(STAGES, WARPGROUPS)
    v_ring = new_ring(STAGES, WARPGROUPS)
    publish_barriers()
    b, h, first = owned_rows(gl.program_id(0), N, H, WARPGROUPS)
    call = (
        (q_desc, k_desc, v_desc), (out_ptr, lse_ptr), (q_tiles, k_tiles, v_tiles), (q_full, k_ring, v_ring),
        (b, h, first, H, N, M), ((out_b, out_h, out_n), head_dim, factor),
    )  # fmt: skip
    run_warpgroups(_attend, _load, call, WARPGROUPS, TILE, D, STAGES)
