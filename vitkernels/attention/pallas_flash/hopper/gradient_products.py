"""The products of a tile in the pair of backward kernels of `pallas_flash` on Hopper.

Both kernels multiply S and dP, compute weights and dS from these, and multiply the results. They do so a few columns at
a time: the tensor cores multiply the first columns while the next ones are computed. dP's product runs while the first
weights are computed.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import async_product, tiles
from vitkernels.attention.pallas_flash.hopper.async_product import STEP
from vitkernels.attention.pallas_flash.hopper.tiles import transposed

_DQ_COLUMNS = 32  # that are computed at a time; with 16 or 64, dq's kernel is up to 3 % slower

# Of columns from the last argument on: weights from S, and dS from weights and dP; both in float32.
WeightsOf = Callable[[jax.Array, int], jax.Array]
DsOf = Callable[[jax.Array, jax.Array, int], jax.Array]


def add_query_gradient(
    dq: tuple,
    starts: tuple[jax.Array | None, jax.Array],
    queries: tuple[tuple, tuple],
    keys: tuple[tuple, tuple],
    weights_of: WeightsOf,
    after_scores: Callable[[], None],
    rows: int,
    dtype: str,
    interpret: bool,
) -> tuple:
    """Return dq with the product of a tile added, one sum per part of K.

    Args:
        dq: in float32.
        starts: what the products of S = Q Kᵀ and of dP = dO Vᵀ start from; see _with_products.
        queries: the groups of Q and of dO, in registers or in shared memory.
        keys: the parts of K and of V in shared memory; see async_product.ring.
        weights_of: see WeightsOf.
        after_scores: called when S has been multiplied.
        rows: of a tile of K.
    """
    k, _ = keys

    def add(scores, wait_for_dp):
        after_scores()
        total, dp = dq, None
        for first, end in _ranges(scores.shape[1], _DQ_COLUMNS):
            weights = weights_of(scores[:, first:end], first)
            dp = wait_for_dp(0) if dp is None else dp
            ds = weights * dp[:, first:end]
            total = async_product.start(total, async_product.operand(ds, dtype), k, interpret, first)
        return async_product.finish(total, interpret)

    return _with_products(starts, queries, keys, rows, add, interpret)


def add_key_gradients(
    sums: tuple[tuple, tuple],
    starts: tuple[jax.Array | None, jax.Array],
    keys: tuple[tuple, tuple],
    queries: tuple[tuple, tuple],
    weights_of: WeightsOf,
    ds_of: DsOf,
    after_scores: Callable[[], None],
    rows: int,
    dtype: str,
    interpret: bool,
) -> tuple[tuple, tuple]:
    """Return dk and dv with the products of a tile added: transposed, so that the keys are rows.

    dv's products run while dS is computed.

    Args:
        sums: dk and dv, in float32, one sum per part of Q and of dO.
        starts: what the products of S = K Qᵀ and of dP = V dOᵀ start from; see _with_products.
        keys: the groups of K and of V, in registers or in shared memory.
        queries: the parts of Q and of dO in shared memory; see async_product.ring.
        weights_of, ds_of: see WeightsOf and DsOf.
        after_scores: called when S has been multiplied.
        rows: of a tile of Q.
    """
    q, do = queries

    def add(scores, wait_for_dp):
        after_scores()
        (dk, dv), weights = sums, []
        ranges = _ranges(scores.shape[1], pl.cdiv(scores.shape[1], 2 * STEP) * STEP)  # two, or one of few columns
        for first, end in ranges:
            weights.append(weights_of(scores[:, first:end], first))
            dv = async_product.start(dv, async_product.operand(weights[-1], dtype), do, interpret, first)
        dp = wait_for_dp(len(ranges) * len(do))
        for (first, end), some in zip(ranges, weights, strict=True):
            ds = ds_of(some, dp[:, first:end], first)
            dk = async_product.start(dk, async_product.operand(ds, dtype), q, interpret, first)
        return async_product.finish(dk, interpret), async_product.finish(dv, interpret)

    return _with_products(starts, keys, queries, rows, add, interpret)


def _ranges(columns: int, width: int) -> list[tuple[int, int]]:
    return [(first, min(first + width, columns)) for first in range(0, columns, width)]


def _with_products(starts, own, streamed, rows: int, add: Callable, interpret: bool) -> tuple:
    """Multiply S and dP, and return add(S, wait_for_dp): wait_for_dp(n) returns dP, n products started after it.

    starts: what S and dP start from; None for zeros. Their width says how many of a tile's rows are used, from the
        first on.
    """
    _, start_of_dp = starts
    columns = start_of_dp.shape[1]
    terms = [
        (start, groups, async_product.groups(parts, rows, columns))
        for start, groups, parts in zip(starts, own, streamed, strict=True)
    ]
    if interpret:  # the interpreter does not support accumulators that are read before all products end
        scores, dp = tiles.products(*terms, interpret=True)
        return add(scores, lambda _: dp)

    def chain(scores_ref, dp_ref):
        refs = scores_ref, dp_ref
        for ref, (start, *_) in zip(refs, terms, strict=True):
            if start is not None:
                ref[...] = start.astype(jnp.float32)
        for ref, (_, a_groups, b_groups) in zip(refs, terms, strict=True):
            for a, b in zip(a_groups, b_groups, strict=True):
                plgpu.wgmma(ref, a, transposed(b))
        scores = plgpu.wgmma_accumulator_load(scores_ref, wait_n=len(own[1]))
        return add(scores, lambda started: plgpu.wgmma_accumulator_load(dp_ref, wait_n=started))

    accumulator = plgpu.ACC(start_of_dp.shape, jnp.float32)
    return pl.run_scoped(chain, accumulator, accumulator)
