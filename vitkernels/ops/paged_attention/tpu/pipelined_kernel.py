"""Paged attention with pages moved by the Pallas pipeline, for pages too narrow for an explicit DMA.

If neither head dim nor pages fill registers, an explicit DMA cannot copy a page, but the pipeline can. Every page of a
block is a separate input, which the compiler copies one grid step ahead from the page that the scalar-prefetched
table names. The grid has as many steps as the longest possible sequence has blocks; steps past a sequence's end only
prefetch the next sequence's first block, once.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads per key head (padded to full registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.ops.paged_attention.tpu.online_softmax import OnlineSoftmax, add_block
from vitkernels.ops.paged_attention.tpu.page_grid import ROWS_16, VMEM_LIMIT, BlockSchedule, PageGrid, cdiv


def attend(grid: PageGrid, schedule: BlockSchedule, q_BKGD, key_cache, value_cache):
    """Return (B, K, G, D)."""

    def rows(core, group_step, sequence_step, i, *scalars):
        b, group = grid.position(core, group_step, sequence_step)
        return b, group, 0, 0

    block = pl.BlockSpec((1, grid.heads, grid.G, grid.D), rows)
    pages = [pl.BlockSpec((grid.heads, 1, grid.S, grid.D), partial(_page_index, grid, j)) for j in range(grid.pages)]
    return pl.pallas_call(
        partial(_kernel, grid=grid),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            grid=(*grid.shape, cdiv(grid.T, grid.pages)),
            in_specs=[block, *pages, *pages],
            out_specs=block,
            scratch_shapes=OnlineSoftmax.scratch(grid),
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGD.shape, q_BKGD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", *("arbitrary",) * 3), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="paged_attention_pipelined",
    )(*schedule, q_BKGD, *[key_cache] * grid.pages, *[value_cache] * grid.pages)


def _page_index(grid: PageGrid, j: int, core, group_step, sequence_step, i, *scalars):
    """Return the cache index of page j of block i; past a sequence's end, of the block that comes next."""
    schedule = BlockSchedule(*scalars)
    b, group = grid.position(core, group_step, sequence_step)
    blocks = cdiv(schedule.lens[b], grid.block_tokens)
    next_group, next_b, _ = grid.next_block(group_step, group, b, jnp.maximum(blocks - 1, 0), schedule)
    onward = (i >= blocks) & (next_b >= 0)
    group, b = jnp.where(onward, next_group, group), jnp.where(onward, next_b, b)
    first = jnp.where(onward, 0, jnp.clip(i, 0, jnp.maximum(blocks - 1, 0))) * grid.pages
    last = jnp.maximum(cdiv(schedule.lens[b], grid.S) - 1, 0)
    page = schedule.tables[b * grid.T + jnp.minimum(first + j, last)]
    return group, jnp.clip(page, 0, grid.P - 1), 0, 0  # clipped: without tokens, the table's entry may be anything


def _kernel(*refs, grid: PageGrid):
    scalars = len(BlockSchedule._fields)
    schedule, (q_ref, *refs) = BlockSchedule(*refs[:scalars]), refs[scalars:]
    keys, values, (o_ref, *softmax) = refs[: grid.pages], refs[grid.pages : 2 * grid.pages], refs[2 * grid.pages :]
    softmax = OnlineSoftmax(*softmax)
    core, group_step, sequence_step, i = (pl.program_id(axis) for axis in range(4))
    b, _ = grid.position(core, group_step, sequence_step)
    valid = schedule.lens[b] - i * grid.block_tokens
    attend_to = partial(add_block, grid, softmax, q_ref, partial(_joined, grid, keys), partial(_joined, grid, values))
    pl.when(i == 0)(softmax.clear)
    pl.when(valid >= grid.block_tokens)(attend_to)
    pl.when((valid > 0) & (valid < grid.block_tokens))(partial(attend_to, valid))

    @pl.when(i == pl.num_programs(3) - 1)
    def _():
        o_ref[0] = softmax.result().astype(o_ref.dtype)


def _joined(grid: PageGrid, refs):
    """Return the pages of a block as (K, N, D). bfloat16 pages of partial registers are joined in float32."""
    pages = [ref[:, 0] for ref in refs]
    if pages[0].dtype.itemsize == 2 and grid.S % ROWS_16:
        return jnp.concatenate([x.astype(jnp.float32) for x in pages], axis=1).astype(pages[0].dtype)
    return jnp.concatenate(pages, axis=1)
