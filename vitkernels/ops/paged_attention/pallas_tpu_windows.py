"""Paged attention where neither head dim nor pages fill registers: a copy of our own cannot be so narrow, a window can.

Every page of a block is an input with a window of its own, which the compiler moves, a grid step ahead, to the page
that the scalar-prefetched table names. The grid has as many steps as the longest possible sequence has blocks; those
past a sequence's end only fetch what comes next, once.

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
    """(B, K, G, D)."""

    def rows(core, group, step, i, *scalars):
        b, group = plan.at(core, group, step)
        return b, group, 0, 0

    block = pl.BlockSpec((1, plan.heads, plan.G, plan.D), rows)
    pages = [pl.BlockSpec((plan.heads, 1, plan.S, plan.D), partial(_page, plan, j)) for j in range(plan.pages)]
    return pl.pallas_call(
        partial(_kernel, plan=plan),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(order),
            grid=(*plan.grid, cdiv(plan.T, plan.pages)),
            in_specs=[block, *pages, *pages],
            out_specs=block,
            scratch_shapes=State.scratch(plan),
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGD.shape, q_BKGD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *("arbitrary",) * 3), vmem_limit_bytes=parts.VMEM_LIMIT
        ),
        name="paged_attention_windows",
    )(*order, q_BKGD, *[key_cache] * plan.pages, *[value_cache] * plan.pages)


def _page(plan: Plan, j: int, core, step_group, step, i, *scalars):
    """Where page j of the block lies. Past a sequence's end: of the next block of all, so that it comes in time."""
    order = Order(*scalars)
    b, group = plan.at(core, step_group, step)
    blocks = cdiv(order.lens[b], plan.tokens)
    next_group, next_b, _ = plan.next_block(step_group, group, b, jnp.maximum(blocks - 1, 0), order)
    onward = (i >= blocks) & (next_b >= 0)
    group, b = jnp.where(onward, next_group, group), jnp.where(onward, next_b, b)
    first = jnp.where(onward, 0, jnp.clip(i, 0, jnp.maximum(blocks - 1, 0))) * plan.pages
    last = jnp.maximum(cdiv(order.lens[b], plan.S) - 1, 0)
    page = order.tables[b * plan.T + jnp.minimum(first + j, last)]
    return group, jnp.clip(page, 0, plan.P - 1), 0, 0  # where there is no token at all, any page


def _kernel(*refs, plan: Plan):
    order, (q_ref, *refs) = Order(*refs[: len(Order._fields)]), refs[len(Order._fields) :]
    keys, values, (o_ref, *state) = refs[: plan.pages], refs[plan.pages : 2 * plan.pages], refs[2 * plan.pages :]
    state = State(*state)
    core, step_group, step, i = (pl.program_id(axis) for axis in range(4))
    b, _ = plan.at(core, step_group, step)
    left = order.lens[b] - i * plan.tokens
    block = partial(attend_block, plan, state, q_ref, partial(_joined, plan, keys), partial(_joined, plan, values))
    pl.when(i == 0)(state.clear)
    pl.when(left >= plan.tokens)(block)
    pl.when((left > 0) & (left < plan.tokens))(partial(block, left))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        o_ref[0] = state.result().astype(o_ref.dtype)


def _joined(plan: Plan, refs):
    """The pages of a block as (K, N, D). Those that do not fill registers of bfloat16 are joined as float32."""
    pages = [ref[:, 0] for ref in refs]
    if pages[0].dtype.itemsize == 2 and plan.S % parts.ROWS_16:
        return jnp.concatenate([x.astype(jnp.float32) for x in pages], axis=1).astype(pages[0].dtype)
    return jnp.concatenate(pages, axis=1)
