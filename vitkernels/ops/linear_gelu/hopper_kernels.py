"""Matrix products for Hopper GPUs with GELU beside the multiplication, in Gluon (Triton's language for explicit layouts).

GELU needs about as many instructions as a third of the product's time at K = 768. So two groups of warps take turns:
while one is in its tile's epilogue, the tensor cores work on the other's tile. A third warp keeps a ring of buffers
filled by TMA copies, in the order in which the groups use them. One program runs on each multiprocessor and goes through
tiles program, program + programs, ...; even ones are the first group's, odd ones the second's.

Barriers: full[s] says that buffer s has its tiles of both factors, empty[s] that nobody reads them any more.

Shape suffixes: M rows (tokens), K the inner dimension, N columns, T tiles of rows.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _gelu_and_slope(x, TANH: gl.constexpr):
    """As gelu_and_slope in triton_kernels.py."""
    if TANH:
        square = x * x
        exponent = x * (-2.302208198144325 - 0.1029432396 * square)
        root = gl.rsqrt(1.0 + gl.exp2(gl.minimum(exponent, 126.0)))
        cdf = root * root
        slope = cdf + x * cdf * (1.0 - cdf) * (1.5957691216057308 + 0.2140644488 * square)
    else:
        bell = gl.exp2((-0.5 * LOG2E) * x * x)
        root = gl.rsqrt(1.0 + 0.23164190 * gl.abs(x))
        t = root * root
        tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
        tail *= t * bell
        cdf = gl.where(x < 0, tail, 1.0 - tail)
        slope = cdf + x * bell * 0.3989422804014327
    return x * cdf, slope


@gluon.jit
def _load_tiles(a_MK, b, a_buffers, b_buffers, full, empty, M, N, K,
                TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
                B_IS_NK: gl.constexpr):  # fmt: skip
    tiles_n = gl.cdiv(N, TILE_N)
    tiles = gl.cdiv(M, TILE_M) * tiles_n
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        m = tile // tiles_n * TILE_M  # a row of tiles reads the left factor from memory once
        n = tile % tiles_n * TILE_N
        for k in range(0, K, TILE_K):
            s = step % STAGES
            mbarrier.wait(empty.index(s), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), a_MK.block_type.nbytes + b.block_type.nbytes)
            tma.async_copy_global_to_shared(a_MK, [m, k], full.index(s), a_buffers.index(s))
            if B_IS_NK:
                tma.async_copy_global_to_shared(b, [n, k], full.index(s), b_buffers.index(s))
            else:
                tma.async_copy_global_to_shared(b, [k, n], full.index(s), b_buffers.index(s))
            step += 1


@gluon.jit
def _multiply(step, K, a_buffers, b_buffers, full, empty,
              TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
              B_IS_NK: gl.constexpr):  # fmt: skip
    """A tile of the product, from the buffers of step, step + 1, ...; each is given back one step later."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE_N, 16])
    acc = gl.zeros([TILE_M, TILE_N], gl.float32, layout)
    for k in range(0, K, TILE_K):
        s = step % STAGES
        mbarrier.wait(full.index(s), (step // STAGES) & 1)
        b = b_buffers.index(s)
        if B_IS_NK:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a_buffers.index(s), b, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        gl.thread_barrier()  # one thread gives the buffer back, for all
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        step += 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    gl.thread_barrier()
    mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _halves(acc, TILE_M: gl.constexpr, TILE_N: gl.constexpr, layout: gl.constexpr):
    """The left and the right half of a tile's columns; the registers stay where they are."""
    left, right = acc.reshape([TILE_M, 2, TILE_N // 2]).permute(0, 2, 1).split()
    return gl.convert_layout(left, layout), gl.convert_layout(right, layout)


@gluon.jit
def _activate_tiles(group: gl.constexpr, bias_N, pre_MN, act_MN, pre_buffer, act_buffer,
                    a_buffers, b_buffers, full, empty, M, N, K,
                    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
                    TANH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = TILE_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    tiles_n = gl.cdiv(N, TILE_N)
    tiles = gl.cdiv(M, TILE_M) * tiles_n
    steps = gl.cdiv(K, TILE_K)
    step = group * steps
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    for tile in range(gl.program_id(0) + group * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        acc = _multiply(step, K, a_buffers, b_buffers, full, empty, TILE_M, TILE_N, TILE_K, STAGES, True)
        step += 2 * steps
        m = tile // tiles_n * TILE_M
        halves = _halves(acc, TILE_M, TILE_N, layout)
        for i in gl.static_range(2):
            n = tile % tiles_n * TILE_N + i * HALF
            bias = gl.load(bias_N + n + columns, mask=n + columns < N, other=0.0).to(gl.float32)
            pre = (halves[i] + gl.expand_dims(bias, 0)).to(gl.bfloat16)
            act, slope = _gelu_and_slope(pre.to(gl.float32), TANH)
            tma.store_wait(pendings=0)  # until the buffers are free again
            gl.thread_barrier()
            pre_buffer.store(pre)
            act_buffer.store(act.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(pre_MN, [m, n], pre_buffer)
            tma.async_copy_shared_to_global(act_MN, [m, n], act_buffer)
    tma.store_wait(pendings=0)


@gluon.jit
def _ring(a_MK, b, STAGES: gl.constexpr):
    """Buffers for both factors, and their barriers."""
    a_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + a_MK.block_type.shape, a_MK.layout)
    b_buffers = gl.allocate_shared_memory(gl.bfloat16, [STAGES] + b.block_type.shape, b.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=1)
        mbarrier.init(empty.index(s), count=1)
    return a_buffers, b_buffers, full, empty


@gluon.jit
def linear_gelu_kernel(
    bias_N, x_MK, weight_NK, pre_MN, act_MN, M, N, K,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, TANH: gl.constexpr,
):  # fmt: skip
    """act = gelu(x weightᵀ + bias), and what gelu was given. Matrices come as descriptors."""
    a_buffers, b_buffers, full, empty = _ring(x_MK, weight_NK, STAGES)
    out: gl.constexpr = pre_MN.block_type.shape
    pre_buffers = gl.allocate_shared_memory(gl.bfloat16, [2] + out, pre_MN.layout)
    act_buffers = gl.allocate_shared_memory(gl.bfloat16, [2] + out, act_MN.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_activate_tiles, (0, bias_N, pre_MN, act_MN, pre_buffers.index(0), act_buffers.index(0),
                               a_buffers, b_buffers, full, empty, M, N, K, TILE_M, TILE_N, TILE_K, STAGES, TANH)),
            (_activate_tiles, (1, bias_N, pre_MN, act_MN, pre_buffers.index(1), act_buffers.index(1),
                               a_buffers, b_buffers, full, empty, M, N, K, TILE_M, TILE_N, TILE_K, STAGES, TANH)),
            (_load_tiles, (x_MK, weight_NK, a_buffers, b_buffers, full, empty, M, N, K,
                           TILE_M, TILE_N, TILE_K, STAGES, True)),
        ],
        [4, 1],  # warps of the second group and of the loader
        [240, 24],  # their registers per thread
    )  # fmt: skip


@gluon.jit
def _deactivate_tiles(group: gl.constexpr, sums_TN, pre_MN, dpre_MN, act_MN, pre_buffers, act_buffer, ready,
                      a_buffers, b_buffers, full, empty, M, N, K,
                      TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr,
                      TANH: gl.constexpr):  # fmt: skip
    HALF: gl.constexpr = TILE_N // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    tiles_n = gl.cdiv(N, TILE_N)
    tiles = gl.cdiv(M, TILE_M) * tiles_n
    steps = gl.cdiv(K, TILE_K)
    step = group * steps
    phase = 0
    columns = gl.arange(0, HALF, layout=gl.SliceLayout(0, layout))
    for tile in range(gl.program_id(0) + group * gl.num_programs(0), tiles, 2 * gl.num_programs(0)):
        tile_m = tile // tiles_n
        m = tile_m * TILE_M
        first = tile % tiles_n * TILE_N
        tma.store_wait(pendings=0)  # dpre of the tile before leaves from these buffers
        mbarrier.expect(ready, 2 * pre_MN.block_type.nbytes)
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(pre_MN, [m, first + i * HALF], ready, pre_buffers.index(i))
        acc = _multiply(step, K, a_buffers, b_buffers, full, empty, TILE_M, TILE_N, TILE_K, STAGES, False)
        step += 2 * steps
        halves = _halves(acc, TILE_M, TILE_N, layout)
        mbarrier.wait(ready, phase)
        phase = phase ^ 1
        for i in gl.static_range(2):
            n = first + i * HALF
            act, slope = _gelu_and_slope(pre_buffers.index(i).load(layout).to(gl.float32), TANH)
            dpre = halves[i] * slope
            # Rows beyond M have zeros for dy, and add nothing.
            gl.store(sums_TN + tile_m * N + n + columns, gl.sum(dpre, 0), mask=n + columns < N)
            pre_buffers.index(i).store(dpre.to(gl.bfloat16))
            tma.store_wait(pendings=0)
            gl.thread_barrier()
            act_buffer.store(act.to(gl.bfloat16))
            fence_async_shared()
            gl.thread_barrier()
            tma.async_copy_shared_to_global(dpre_MN, [m, n], pre_buffers.index(i))
            tma.async_copy_shared_to_global(act_MN, [m, n], act_buffer)
    tma.store_wait(pendings=0)


@gluon.jit
def gelu_linear_backward_kernel(
    sums_TN, dy_MK, weight_KN, pre_MN, dpre_MN, act_MN, M, N, K,
    TILE_M: gl.constexpr, TILE_N: gl.constexpr, TILE_K: gl.constexpr, STAGES: gl.constexpr, TANH: gl.constexpr,
):  # fmt: skip
    """dpre = (dy weight) gelu'(pre), its sums over each tile's rows, and gelu(pre) again."""
    a_buffers, b_buffers, full, empty = _ring(dy_MK, weight_KN, STAGES)
    out: gl.constexpr = pre_MN.block_type.shape
    pre_buffers0 = gl.allocate_shared_memory(gl.bfloat16, [2] + out, pre_MN.layout)
    pre_buffers1 = gl.allocate_shared_memory(gl.bfloat16, [2] + out, pre_MN.layout)
    act_buffers = gl.allocate_shared_memory(gl.bfloat16, [2] + out, act_MN.layout)
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(ready.index(group), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_deactivate_tiles, (0, sums_TN, pre_MN, dpre_MN, act_MN, pre_buffers0, act_buffers.index(0), ready.index(0),
                                 a_buffers, b_buffers, full, empty, M, N, K, TILE_M, TILE_N, TILE_K, STAGES, TANH)),
            (_deactivate_tiles, (1, sums_TN, pre_MN, dpre_MN, act_MN, pre_buffers1, act_buffers.index(1), ready.index(1),
                                 a_buffers, b_buffers, full, empty, M, N, K, TILE_M, TILE_N, TILE_K, STAGES, TANH)),
            (_load_tiles, (dy_MK, weight_KN, a_buffers, b_buffers, full, empty, M, N, K,
                           TILE_M, TILE_N, TILE_K, STAGES, False)),
        ],
        [4, 1],  # warps of the second group and of the loader
        [240, 24],  # their registers per thread
    )  # fmt: skip
