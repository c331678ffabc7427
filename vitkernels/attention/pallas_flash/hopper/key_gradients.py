"""The products of dk and dv of a tile of queries in the pair of backward kernels of `pallas_flash` on Hopper."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.tiles import transposed


def add_key_gradients(
    sums: tuple[tuple, tuple],
    starts: tuple[jax.Array, jax.Array],
    keys: tuple[tuple, tuple],
    queries: tuple[tuple, tuple],
    weights_of: Callable[[jax.Array], jax.Array],
    ds_of: Callable[[jax.Array, jax.Array], jax.Array],
    dtype: str,
    interpret: bool,
) -> tuple[tuple, tuple]:
    """Return dk and dv with the products of a tile added: transposed, so that the keys are rows.

    dP's product runs while the weights are computed, and dv's while dS is.

    Args:
        sums: dk and dv, in float32.
        starts: what the products of S = K Qᵀ and of dP = V dOᵀ start from.
        keys: the parts of K and of V, in registers or in shared memory.
        queries: the parts of Q and of dO in shared memory: as many rows as S and dP have columns, rounded up to ROWS.
            S and dP take only the first of them.
        weights_of: weights_of(S), in float32.
        ds_of: ds_of(weights, dP), in float32.
    """
    (dk, dv), (k, v), (q, do) = sums, keys, queries
    start_of_scores, start_of_dp = (x.astype(jnp.float32) for x in starts)
    columns = start_of_scores.shape[1]
    some_q, some_do = tiles.first_rows(q, columns), tiles.first_rows(do, columns)

    def operand(x):
        return tiles.widened(x.astype(dtype))

    if interpret:  # the interpreter supports neither pl.run_state nor register operands
        scores, dp = tiles.products((start_of_scores, k, some_q), (start_of_dp, v, some_do), interpret=True)
        weights = weights_of(scores)
        ds = operand(ds_of(weights, dp))
        products = [(i, ds, part) for i, part in enumerate(q)]
        products += [(len(dk) + i, operand(weights), part) for i, part in enumerate(do)]
        all_sums = tiles.accumulated((*dk, *dv), products, interpret)
        return all_sums[: len(dk)], all_sums[len(dk) :]

    def chain(refs):
        scores_ref, dp_ref, dk_refs, dv_refs = refs
        for ref, a_parts, b_parts in ((scores_ref, k, some_q), (dp_ref, v, some_do)):
            for a, b in zip(a_parts, b_parts, strict=True):
                plgpu.wgmma(ref, a, transposed(b))
        weights = weights_of(plgpu.wgmma_accumulator_load(scores_ref, wait_n=len(v)))
        _multiply(dv_refs, operand(weights), do)
        ds = ds_of(weights, plgpu.wgmma_accumulator_load(dp_ref, wait_n=len(dv)))
        _multiply(dk_refs, operand(ds), q)

    values = start_of_scores, start_of_dp, dk, dv
    *_, dk, dv = pl.run_state(chain)(jax.tree.map(plgpu.ACC.init, values))
    return dk, dv


def _multiply(refs, a, b_parts) -> None:
    for ref, b in zip(refs, b_parts, strict=True):
        plgpu.wgmma(ref, a, b)
