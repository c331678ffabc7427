"""Paged attention with copies of our own: while one block of pages is attended to, the next is on its way from HBM.

One grid step attends one sequence, with some or all of its key heads at once. Each page is one copy, whose source the
scalar-prefetched table names, into one half of a double buffer; the last block of a sequence is followed by the first
of the next sequence that has tokens, so that the copies never pause.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one (padded to whole registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.ops.paged_attention import pallas_tpu_parts as parts
from vitkernels.ops.paged_attention.pallas_tpu_parts import Order, Plan, State, attend_block, cdiv


def attend(plan: Plan, order: Order, q_BKGD, key_cache, value_cache):
    """(B, K, G, D); the caches' last dimension, D or, turned, S, fills whole registers."""

    def rows(core, group, step, *scalars):
        b, group = plan.at(core, group, step)
        return b, group, 0, 0

    block = pl.BlockSpec((1, plan.heads, plan.G, plan.D), rows)
    buffer = pltpu.VMEM((2, plan.heads, plan.pages, *key_cache.shape[2:]), key_cache.dtype)
    return pl.pallas_call(
        partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(order),
            grid=plan.grid,
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2, 2)), *State.scratch(plan)],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGD.shape, q_BKGD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=parts.VMEM_LIMIT
        ),
        name="paged_attention_copies",
    )(*order, q_BKGD, key_cache, value_cache)


class _Copies:
    """Blocks of keys and of values from the caches to the double buffers."""

    def __init__(self, plan: Plan, order: Order, caches, buffers, semaphores):
        self.plan, self.order = plan, order
        self.parts = [(caches[i], buffers[i], semaphores.at[i]) for i in range(2)]  # keys, values

    def _pages(self, b, i):
        """How many the block has: the last one of a sequence may be short."""
        return jnp.minimum(self.plan.pages, cdiv(self.order.lens[b], self.plan.S) - i * self.plan.pages)

    def _page(self, part, group, b, i, j, half):
        cache, buffer, semaphore = self.parts[part]
        page = self.order.tables[b * self.plan.T + i * self.plan.pages + j]
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

    def rows(self, part, half):
        """A half of a buffer as attend_block wants it. Pages that do not fill registers of bfloat16 join as float32."""
        plan, x = self.plan, self.parts[part][1][half]
        if plan.turned:
            return jnp.concatenate([x[:, j] for j in range(plan.pages)], axis=2)
        joined = (plan.heads, plan.tokens, plan.D)
        if x.dtype.itemsize == 2 and plan.S % parts.ROWS_16:
            return x.astype(jnp.float32).reshape(joined).astype(x.dtype)
        return x.reshape(joined)


def _kernel(*refs, plan: Plan):
    order, refs = Order(*refs[: len(Order._fields)]), refs[len(Order._fields) :]
    q_ref, k_hbm, v_hbm, o_ref, k_buffer, v_buffer, semaphores, *state = refs
    state = State(*state)
    copies = _Copies(plan, order, (k_hbm, v_hbm), (k_buffer, v_buffer), semaphores)
    core, step_group, step = (pl.program_id(axis) for axis in range(3))
    b, group = plan.at(core, step_group, step)
    part = plan.part(b)
    length = order.lens[b]
    whole = length // plan.tokens
    first_half = step_group * order.blocks[part] + order.before[b]
    state.clear()

    @pl.when((step_group == 0) & (b == order.first[part]))
    def _():  # nobody came before to start this one
        copies.start(group, b, 0, 0)

    def block(i, half, whole: bool):
        def loaded(part):
            copies.wait(part, group, b, i, half, whole)
            return copies.rows(part, half)

        left = None if whole else length - i * plan.tokens
        attend_block(plan, state, q_ref, lambda: loaded(0), lambda: loaded(1), left)

    @pl.loop(0, cdiv(length, plan.tokens))
    def _(i):
        half = (first_half + i) % 2
        next_group, next_b, next_i = plan.next_block(step_group, group, b, i, order)
        pl.when(next_b >= 0)(lambda: copies.start(next_group, next_b, next_i, 1 - half))
        pl.when(i < whole)(lambda: block(i, half, True))
        pl.when(i >= whole)(lambda: block(i, half, False))

    o_ref[0] = state.result().astype(o_ref.dtype)
