"""Paged attention as a JAX function: while one block of pages is attended to, the next one is on its way from HBM.

One grid step attends one sequence, with some or all of its key heads at once. Each page is one copy, whose source the
scalar-prefetched table names, into one half of a double buffer; the last block of a sequence is followed by the first
of the next sequence that has tokens, so that the copies never pause. Softmax is online, over blocks.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one (padded to whole registers), D
head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LOG2E = math.log2(math.e)
LANES, ROWS = 128, 8  # of a register of float32
BUFFER_LIMIT = 32 * 2**20  # bytes of the four halves of the two buffers
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB

f32 = jnp.float32


def _cdiv(a, b):
    return (a + b - 1) // b


@dataclass(frozen=True)
class Plan:
    """One call's static side: what a grid step attends, and how the grid is divided between cores."""

    B: int
    K: int
    G: int
    D: int
    P: int
    S: int
    T: int
    pages: int  # of a block
    heads: int  # key heads of a step
    megacore_mode: str | None
    soft_cap: float | None

    @classmethod
    def of(cls, query, key_cache, block_tables, pages_per_compute_block, megacore_mode, soft_cap) -> "Plan":
        (B, H, D), (K, P, S, _), T = query.shape, key_cache.shape, block_tables.shape[1]
        page_bytes = 4 * S * _cdiv(D, LANES) * LANES * key_cache.dtype.itemsize
        pages = max(1, min(pages_per_compute_block, T, BUFFER_LIMIT // page_bytes))
        most = K // 2 if megacore_mode == "kv_head" else K
        fitting = max(1, BUFFER_LIMIT // (pages * page_bytes))
        heads = max(h for h in range(1, most + 1) if most % h == 0 and h <= fitting)
        G = _cdiv(H // K, ROWS) * ROWS
        return cls(B, K, G, D, P, S, T, pages, heads, megacore_mode, soft_cap)

    @property
    def grid(self) -> tuple[int, int, int]:
        """Cores, steps over key heads, steps over sequences; a core has all of two of them, and its part of one."""
        groups = self.K // self.heads
        if self.megacore_mode == "kv_head":
            return 2, groups // 2, self.B
        return (2, groups, self.B // 2) if self.megacore_mode == "batch" else (1, groups, self.B)

    @property
    def tokens(self) -> int:
        """Of a block."""
        return self.pages * self.S

    def at(self, core, group, sequence):
        """The sequence and the group of key heads of a grid step."""
        if self.megacore_mode == "batch":
            sequence += core * (self.B // 2)
        if self.megacore_mode == "kv_head":
            group += core * (self.K // self.heads // 2)
        return sequence, group

    def order(self, lens_B):
        """For each sequence: blocks before it, and the next one that has tokens (-1: none); for each core's part of the
        batch: the first that has tokens, and its blocks."""
        blocks = _cdiv(lens_B, self.tokens).reshape(2 if self.megacore_mode == "batch" else 1, -1)
        before = jnp.cumsum(blocks, axis=1) - blocks
        busy = jnp.where(blocks > 0, jnp.arange(self.B).reshape(blocks.shape), self.B)
        first = lax.cummin(busy, axis=1, reverse=True)
        following = jnp.pad(first[:, 1:], ((0, 0), (0, 1)), constant_values=self.B)
        following = jnp.where(following == self.B, -1, following)
        arrays = (before, following, first[:, 0], jnp.sum(blocks, axis=1))
        return tuple(x.reshape(-1).astype(jnp.int32) for x in arrays)


def attend(
    query,
    key_cache,
    value_cache,
    context_lens,
    block_tables,
    *,
    pages_per_compute_block: int,
    megacore_mode: str | None,
    soft_cap: float | None,
):
    """(B, H, D); lengths and pages out of range make their sequence NaN. Tables are int32."""
    plan = Plan.of(query, key_cache, block_tables, pages_per_compute_block, megacore_mode, soft_cap)
    used_BT = jnp.arange(plan.T) * plan.S < context_lens[:, None]
    outside_BT = used_BT & ((block_tables < 0) | (block_tables >= plan.P))
    broken_B = jnp.any(outside_BT, axis=1) | (context_lens < 0) | (context_lens > plan.T * plan.S)
    lens_B = jnp.where(broken_B, 0, context_lens)  # nothing of such a sequence is read
    q_BKGD = query.reshape(plan.B, plan.K, -1, plan.D)
    own = q_BKGD.shape[2]
    q_BKGD = jnp.pad(q_BKGD, ((0, 0), (0, 0), (0, plan.G - own), (0, 0)))
    out_BKGD = _call(plan, q_BKGD, key_cache, value_cache, lens_B, block_tables)
    out_BHD = out_BKGD[:, :, :own].reshape(query.shape)
    return jnp.where(broken_B[:, None, None], jnp.nan, out_BHD)


def _call(plan: Plan, q_BKGD, key_cache, value_cache, lens_B, block_tables):
    scalars = (lens_B, block_tables.reshape(-1), *plan.order(lens_B))

    def rows(core, group, sequence, *scalars):
        sequence, group = plan.at(core, group, sequence)
        return sequence, group, 0, 0

    block = pl.BlockSpec((1, plan.heads, plan.G, plan.D), rows)
    buffer = pltpu.VMEM((2, plan.heads, plan.pages, plan.S, plan.D), key_cache.dtype)
    return pl.pallas_call(
        partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=plan.grid,
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[
                buffer,
                buffer,
                pltpu.VMEM((plan.heads, plan.G, 1), f32),
                pltpu.VMEM((plan.heads, plan.G, 1), f32),
                pltpu.VMEM((plan.heads, plan.G, plan.D), f32),
                pltpu.SemaphoreType.DMA((2, 2)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGD.shape, q_BKGD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="paged_attention",
    )(*scalars, q_BKGD, key_cache, value_cache)


class _Copies:
    """Blocks of keys and of values from the caches to the double buffers."""

    def __init__(self, plan: Plan, lens_ref, tables_ref, caches, buffers, semaphores):
        self.plan, self.lens_ref, self.tables_ref = plan, lens_ref, tables_ref
        self.parts = [(caches[i], buffers[i], semaphores.at[i]) for i in range(2)]  # keys, values

    def _pages(self, b, i):
        """How many the block has: the last one of a sequence may be short."""
        return jnp.minimum(self.plan.pages, _cdiv(self.lens_ref[b], self.plan.S) - i * self.plan.pages)

    def _page(self, part, group, b, i, j, half):
        cache, buffer, semaphore = self.parts[part]
        page = self.tables_ref[b * self.plan.T + i * self.plan.pages + j]
        heads = pl.ds(group * self.plan.heads, self.plan.heads)
        return pltpu.make_async_copy(cache.at[heads, page], buffer.at[half, :, j], semaphore.at[half])

    def start(self, group, b, i, half):
        @pl.loop(0, self._pages(b, i))
        def _(j):
            for part in range(2):
                self._page(part, group, b, i, j, half).start()

    def wait(self, part, group, b, i, half, whole: bool):
        if whole:  # one wait for the bytes of all its pages
            _, buffer, semaphore = self.parts[part]
            pltpu.make_async_copy(buffer.at[half], buffer.at[half], semaphore.at[half]).wait()
            return

        @pl.loop(0, self._pages(b, i))
        def _(j):
            self._page(part, group, b, i, j, half).wait()


def _kernel(
    lens_ref, tables_ref, before_ref, following_ref, first_ref, blocks_ref,
    q_ref, k_hbm, v_hbm, o_ref, k_buffer, v_buffer, top_ref, sum_ref, acc_ref, semaphores, *, plan: Plan,
):  # fmt: skip
    core, step_group, step = (pl.program_id(axis) for axis in range(3))
    b, group = plan.at(core, step_group, step)
    part = core if plan.megacore_mode == "batch" else 0  # of the batch
    copies = _Copies(plan, lens_ref, tables_ref, (k_hbm, v_hbm), (k_buffer, v_buffer), semaphores)
    length = lens_ref[b]
    blocks, whole = _cdiv(length, plan.tokens), length // plan.tokens
    first_half = step_group * blocks_ref[part] + before_ref[b]

    top_ref[...] = jnp.full_like(top_ref, -jnp.inf)
    sum_ref[...] = jnp.zeros_like(sum_ref)
    acc_ref[...] = jnp.zeros_like(acc_ref)

    @pl.when((step_group == 0) & (b == first_ref[part]))
    def _():  # nobody came before to start this one
        copies.start(group, b, 0, 0)

    @pl.loop(0, blocks)
    def _(i):
        half = (first_half + i) % 2
        _start_next(plan, copies, step_group, group, b, i, blocks, following_ref[b], first_ref[part], 1 - half)

        @pl.when(i < whole)
        def _():
            _attend_block(plan, copies, group, b, i, half, length, q_ref, top_ref, sum_ref, acc_ref, whole=True)

        @pl.when(i >= whole)
        def _():
            _attend_block(plan, copies, group, b, i, half, length, q_ref, top_ref, sum_ref, acc_ref, whole=False)

    total = sum_ref[...]
    o_ref[0] = (acc_ref[...] / jnp.where(total == 0.0, 1.0, total)).astype(o_ref.dtype)


def _start_next(plan: Plan, copies: _Copies, step_group, group, b, i, blocks, following, first, half):
    """Starts the block after this one: of this sequence, of the next, or of the first with the next key heads."""
    here = i + 1 < blocks
    again = (following < 0) & (step_group + 1 < plan.grid[1])
    next_b = jnp.where(here, b, jnp.where(again, first, following))
    next_group = jnp.where(here | ~again, group, group + 1)

    @pl.when(next_b >= 0)
    def _():
        copies.start(next_group, next_b, jnp.where(here, i + 1, 0), half)


def _attend_block(plan: Plan, copies: _Copies, group, b, i, half, length, q_ref, top_ref, sum_ref, acc_ref, *, whole):
    copies.wait(0, group, b, i, half, whole)
    k_KND = _rows(plan, copies.parts[0][1], half)
    s_KGN = _dot(q_ref[0], k_KND, 2)
    if plan.soft_cap is not None:
        s_KGN = plan.soft_cap * jnp.tanh(s_KGN / plan.soft_cap)
    s_KGN *= LOG2E
    left = length - i * plan.tokens
    if not whole:
        s_KGN = jnp.where(lax.broadcasted_iota(jnp.int32, s_KGN.shape, 2) < left, s_KGN, -jnp.inf)
    top = jnp.maximum(top_ref[...], jnp.max(s_KGN, axis=2, keepdims=True))
    shrink = jnp.exp2(top_ref[...] - top)
    p_KGN = jnp.exp2(s_KGN - top)
    top_ref[...] = top
    sum_ref[...] = sum_ref[...] * shrink + jnp.sum(p_KGN, axis=2, keepdims=True)
    copies.wait(1, group, b, i, half, whole)
    v_KND = _rows(plan, copies.parts[1][1], half)
    if not whole:  # what lies past the end may be NaN, and 0 · NaN is not 0
        v_KND = jnp.where(lax.broadcasted_iota(jnp.int32, v_KND.shape, 1) < left, v_KND, jnp.zeros_like(v_KND))
    acc_ref[...] = acc_ref[...] * shrink + _dot(p_KGN.astype(v_KND.dtype), v_KND, 1)


def _rows(plan: Plan, buffer, half):
    """A half of a buffer as (K, N, D). Pages that do not fill registers of 16 bfloat16 rows are joined as float32."""
    x = buffer[half]
    joined = (plan.heads, plan.tokens, plan.D)
    if x.dtype.itemsize == 2 and plan.S % (2 * ROWS):
        return x.astype(f32).reshape(joined).astype(x.dtype)
    return x.reshape(joined)


def _dot(a, b, over: int):
    """The products of each key head, summed over the last axis of `a` and axis `over` of `b`, in float32."""
    # A float32 product of honest float32: the MXU would otherwise round its inputs to bfloat16.
    precision = lax.Precision.HIGHEST if a.dtype == f32 else None
    return lax.dot_general(a, b, (((2,), (over,)), ((0,), (0,))), precision=precision, preferred_element_type=f32)
