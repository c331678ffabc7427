"""Paged attention as a JAX function: check lengths and tables on the device, pad the query heads, run a kernel.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads per key head (padded to full registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

import jax.numpy as jnp

from vitkernels.ops.paged_attention.tpu import dma_kernel, pipelined_kernel
from vitkernels.ops.paged_attention.tpu.page_grid import PageGrid


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
    """Return (B, H, D). Sequences with a length or page out of range give NaN. Lengths and tables are int32."""
    grid = PageGrid.of(query, key_cache, block_tables, pages_per_compute_block, megacore_mode, soft_cap)
    used_BT = jnp.arange(grid.T) * grid.S < context_lens[:, None]
    outside_BT = used_BT & ((block_tables < 0) | (block_tables >= grid.P))
    invalid_B = jnp.any(outside_BT, axis=1) | (context_lens < 0) | (context_lens > grid.T * grid.S)
    lens_B = jnp.where(invalid_B, 0, context_lens)  # an invalid sequence reads nothing
    q_BKGD = query.reshape(grid.B, grid.K, -1, grid.D)
    unpadded = q_BKGD.shape[2]
    q_BKGD = jnp.pad(q_BKGD, ((0, 0), (0, 0), (0, grid.G - unpadded), (0, 0)))
    schedule = grid.schedule(lens_B, block_tables)
    if grid.transposed:  # matches the memory layout, so XLA copies nothing
        key_cache, value_cache = (jnp.swapaxes(cache, 2, 3) for cache in (key_cache, value_cache))
    kernel = pipelined_kernel if grid.pipelined else dma_kernel
    out_BKGD = kernel.attend(grid, schedule, q_BKGD, key_cache, value_cache)
    out_BHD = out_BKGD[:, :, :unpadded].reshape(query.shape)
    return jnp.where(invalid_B[:, None, None], jnp.nan, out_BHD)
