"""What the Gluon kernels share: warp specialization, rings of tiles in shared memory, register layouts.

One warp, the producer, loads tiles by TMA into rings of stages. Each of the WARPGROUPS consumers owns ROWS rows. While
one computes softmax weights, the tensor cores multiply for another (FlashAttention-3, Shah et al. 2024, arXiv
2407.08608, section 3.1).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

ROWS = gl.constexpr(64)  # of a warpgroup, because wgmma multiplies 64 rows


@gluon.jit
def _run(task: gl.constexpr, call, which: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr):
    task(call, which, TILE, D, STAGES)


@gluon.jit
def run_warpgroups(
    compute: gl.constexpr, load: gl.constexpr, call,
    WARPGROUPS: gl.constexpr, TILE: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run load(call, WARPGROUPS, ...) in the producer, and compute(call, i, ...) in consumers i = 0, 1 and perhaps 2.

    call: (descriptors, pointers, tiles in shared memory, barriers, (b, h, first row, H, N, M), (strides of each tensor
    that is stored or loaded by pointer, head_dim, the scale or factor)). All parts but constants are in one tuple,
    because a partition takes a tuple of arguments.

    A multiprocessor has 65,536 registers: 512 per thread of one warpgroup. The lists of registers omit the first
    consumer, which gets what the others leave.
    """
    first, second, third = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
    if WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_run, (compute, call, first, TILE, D, STAGES)),
                (_run, (compute, call, second, TILE, D, STAGES)),
                (_run, (load, call, WARPGROUPS, TILE, D, STAGES)),
            ],
            [4, 1],
            [240, 32],
        )
    else:
        gl.warp_specialize(
            [
                (_run, (compute, call, first, TILE, D, STAGES)),
                (_run, (compute, call, second, TILE, D, STAGES)),
                (_run, (compute, call, third, TILE, D, STAGES)),
                (_run, (load, call, WARPGROUPS, TILE, D, STAGES)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@gluon.jit
def owned_rows(program, tokens, H, WARPGROUPS: gl.constexpr):
    """Return the batch entry, the head and the first row of a program; a head's programs are consecutive."""
    count = gl.cdiv(tokens, WARPGROUPS * ROWS)
    head = program // count
    return head // H, head % H, program % count * (WARPGROUPS * ROWS)


# --- rings of tiles ---------------------------------------------------------------------------------------------------


@gluon.jit
def new_ring(STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, LOADS: gl.constexpr = 1):
    """Return the barriers (full, empty) of each stage.

    A stage is full after LOADS arrivals and all its bytes, and empty once every consumer has released it.
    """
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=LOADS)
        mbarrier.init(empty.index(stage), count=WARPGROUPS)
    return full, empty


@gluon.jit
def new_barrier():
    """Return a barrier that is waited for once."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def publish_barriers():
    """Make initialized barriers visible to the TMA unit."""
    fence_async_shared()


@gluon.jit
def begin_load(ring, i, STAGES: gl.constexpr, BYTES: gl.constexpr):
    """Wait until the stage of tile i is empty, and let its full barrier expect BYTES. Return the stage."""
    full, empty = ring
    stage = i % STAGES
    mbarrier.wait(empty.index(stage), (i // STAGES + 1) & 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def wait_until_full(ring, i, STAGES: gl.constexpr):
    """Wait until tile i has been loaded. Return its stage."""
    full, _ = ring
    stage = i % STAGES
    mbarrier.wait(full.index(stage), (i // STAGES) & 1)
    return stage


@gluon.jit
def release(ring, stage):
    """Give a stage back to the producer, after all of this consumer's products with it."""
    _, empty = ring
    mbarrier.arrive(empty.index(stage), count=1)


# --- registers --------------------------------------------------------------------------------------------------------


@gluon.constexpr_function
def product_layout(columns):
    """Return the layout of a warpgroup's accumulators, (ROWS, columns)."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Return the layout of a product's first operand in registers; its result has `columns` columns."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(columns), k_width=2)


@gluon.jit
def columns_of(x, i: gl.constexpr, PARTS: gl.constexpr):
    """Return the i-th of PARTS equal ranges of columns. Each thread has a part of each range: nothing moves."""
    if PARTS > 1:
        halves = x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()
        x = columns_of(halves[2 * i // PARTS], i % (PARTS // 2), PARTS // 2)
    return x


@gluon.jit
def sums_per_thread(x):
    """Return (rows, 4): for thread j of a row's four, the sum over columns 8 i + 2 j and 8 i + 2 j + 1."""
    groups: gl.constexpr = x.shape[1] // 8
    return gl.sum(gl.sum(x.reshape([x.shape[0], groups, 4, 2]), 3), 1)


_STORE_IF_NEGATIVE = gl.constexpr(
    "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $1, 0f00000000; @p st.shared.f32 [a], $1; "
    "mov.b32 $0, $1; }"
)


@gluon.jit
def pin(x):
    """Return x, and make ptxas compute it before the next wait for products.

    ptxas may move arithmetic behind such a wait, where it would not overlap with the products. It does not move stores
    to shared memory, and does not know that this one is never executed. x must not be negative, or the store would
    write to address 0; NaN is safe.
    """
    return gl.inline_asm_elementwise(_STORE_IF_NEGATIVE, "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1)


# --- rows in device memory --------------------------------------------------------------------------------------------


@gluon.jit
def store_rows(ptr, x, b, h, n, limit, strides, head_dim, D: gl.constexpr):
    """Store rows n < limit of a head; x has D columns in the layout of products, of which head_dim exist."""
    pointers, inside = rows_of_head(ptr, b, h, n, limit, strides, head_dim, D)
    gl.store(pointers, x.to(ptr.dtype.element_ty), mask=inside)


@gluon.jit
def rows_of_head(ptr, b, h, n, limit, strides, head_dim, D: gl.constexpr):
    """Return pointers to rows n of a head, and which of their D columns exist: head_dim of rows n < limit.

    Strides and head_dim are multiples of 8; the hints allow loads and stores of adjacent columns together.
    """
    d = gl.arange(0, D, gl.SliceLayout(0, product_layout(D)))
    head = b.to(gl.int64) * gl.multiple_of(strides[0], 8) + h.to(gl.int64) * gl.multiple_of(strides[1], 8)
    rows = n.to(gl.int64)[:, None] * gl.multiple_of(strides[2], 8)
    inside = (n < limit)[:, None] & (d < gl.multiple_of(head_dim, 8))[None, :]
    return ptr + head + rows + d[None, :], inside
