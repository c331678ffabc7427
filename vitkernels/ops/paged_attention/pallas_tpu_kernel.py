"""Paged attention as a JAX function: checks the tables' values on the device, pads the heads, picks the kernel.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one (padded to whole registers),
D head dim, P pages, S tokens per page, T pages per sequence, N tokens of a block.
"""

import jax.numpy as jnp

from vitkernels.ops.paged_attention import pallas_tpu_copies, pallas_tpu_windows
from vitkernels.ops.paged_attention.pallas_tpu_parts import Plan


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
    order = plan.order(lens_B, block_tables)
    if plan.turned:  # no copy: so they lie in memory
        key_cache, value_cache = (jnp.swapaxes(cache, 2, 3) for cache in (key_cache, value_cache))
    kernel = pallas_tpu_windows if plan.by_windows else pallas_tpu_copies
    out_BKGD = kernel.attend(plan, order, q_BKGD, key_cache, value_cache)
    out_BHD = out_BKGD[:, :, :own].reshape(query.shape)
    return jnp.where(broken_B[:, None, None], jnp.nan, out_BHD)
