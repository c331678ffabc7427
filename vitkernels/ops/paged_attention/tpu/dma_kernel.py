"""Paged attention with explicit DMA: while one block of pages is attended to, the next is copied from HBM.

One grid step attends to one sequence, with a group of key heads at a time. Each page is one DMA, from the page that the
scalar-prefetched table names into one half of a double buffer. The last block of a sequence is followed by the first
block of the next non-empty sequence, so copies never pause.

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
    """Return (B, K, G, D). The caches' last dimension, D or, if transposed, S, fills full registers."""

    def rows(core, group_step, sequence_step, *scalars):
        b, group = grid.position(core, group_step, sequence_step)
        return b, group, 0, 0

    block = pl.BlockSpec((1, grid.heads, grid.G, grid.D), rows)
    buffer = pltpu.VMEM((2, grid.heads, grid.pages, *key_cache.shape[2:]), key_cache.dtype)
    return pl.pallas_call(
        partial(_kernel, grid=grid),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(schedule),
            grid=grid.shape,
            in_specs=[block, pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pl.ANY)],
            out_specs=block,
            scratch_shapes=[buffer, buffer, pltpu.SemaphoreType.DMA((2, 2)), *OnlineSoftmax.scratch(grid)],
        ),
        out_shape=jax.ShapeDtypeStruct(q_BKGD.shape, q_BKGD.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        name="paged_attention_dma",
    )(*schedule, q_BKGD, key_cache, value_cache)


_KEYS, _VALUES = 0, 1


class _PageCopies:
    """The DMAs that move blocks of keys and values from the caches to the halves of the double buffers."""

    def __init__(self, grid: PageGrid, schedule: BlockSchedule, caches, buffers, semaphores):
        self.grid, self.schedule = grid, schedule
        self.channels = [(caches[i], buffers[i], semaphores.at[i]) for i in (_KEYS, _VALUES)]

    def _pages(self, b, i):
        """Return the number of pages of block i; the last block of a sequence may be short."""
        return jnp.minimum(self.grid.pages, cdiv(self.schedule.lens[b], self.grid.S) - i * self.grid.pages)

    def _page(self, which, group, b, i, j, half):
        cache, buffer, semaphore = self.channels[which]
        page = self.schedule.tables[b * self.grid.T + i * self.grid.pages + j]
        heads = pl.ds(group * self.grid.heads, self.grid.heads)
        return pltpu.make_async_copy(cache.at[heads, page], buffer.at[half, :, j], semaphore.at[half])

    def start(self, group, b, i, half):
        """Start copying block i of sequence b, keys and values, into a half of the buffers."""

        @pl.loop(0, self._pages(b, i))
        def _(j):
            for which in (_KEYS, _VALUES):
                self._page(which, group, b, i, j, half).start()

    def wait(self, which, group, b, i, half, full: bool):
        """Wait for the keys or the values of a block."""
        if full:  # one wait for the bytes of all pages
            _, buffer, semaphore = self.channels[which]
            pltpu.make_async_copy(buffer.at[half], buffer.at[half], semaphore.at[half]).wait()
            return

        @pl.loop(0, self._pages(b, i))
        def _(j):
            self._page(which, group, b, i, j, half).wait()

    def block(self, which, half):
        """Return half of a buffer in add_block's layout. bfloat16 pages of partial registers are joined in float32."""
        grid, x = self.grid, self.channels[which][1][half]
        if grid.transposed:
            return jnp.concatenate([x[:, j] for j in range(grid.pages)], axis=2)
        joined = (grid.heads, grid.block_tokens, grid.D)
        if x.dtype.itemsize == 2 and grid.S % ROWS_16:
            return x.astype(jnp.float32).reshape(joined).astype(x.dtype)
        return x.reshape(joined)


def _kernel(*refs, grid: PageGrid):
    schedule, refs = BlockSchedule(*refs[: len(BlockSchedule._fields)]), refs[len(BlockSchedule._fields) :]
    q_ref, k_hbm, v_hbm, o_ref, k_buffer, v_buffer, semaphores, *softmax = refs
    softmax = OnlineSoftmax(*softmax)
    copies = _PageCopies(grid, schedule, (k_hbm, v_hbm), (k_buffer, v_buffer), semaphores)
    core, group_step, sequence_step = (pl.program_id(axis) for axis in range(3))
    b, group = grid.position(core, group_step, sequence_step)
    batch_half = grid.batch_half(b)
    length = schedule.lens[b]
    full_blocks = length // grid.block_tokens
    first_half = group_step * schedule.blocks[batch_half] + schedule.blocks_before[b]
    softmax.clear()

    @pl.when((group_step == 0) & (b == schedule.first_nonempty[batch_half]))
    def _():  # no earlier step started the first block
        copies.start(group, b, 0, 0)

    def attend_to(i, half, full: bool):
        def loaded(which):
            copies.wait(which, group, b, i, half, full)
            return copies.block(which, half)

        valid = None if full else length - i * grid.block_tokens
        add_block(grid, softmax, q_ref, lambda: loaded(_KEYS), lambda: loaded(_VALUES), valid)

    @pl.loop(0, cdiv(length, grid.block_tokens))
    def _(i):
        half = (first_half + i) % 2
        next_group, next_b, next_i = grid.next_block(group_step, group, b, i, schedule)
        pl.when(next_b >= 0)(lambda: copies.start(next_group, next_b, next_i, 1 - half))
        pl.when(i < full_blocks)(lambda: attend_to(i, half, True))
        pl.when(i >= full_blocks)(lambda: attend_to(i, half, False))

    o_ref[0] = softmax.result().astype(o_ref.dtype)
