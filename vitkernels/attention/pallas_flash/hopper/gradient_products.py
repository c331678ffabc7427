"""The products of a tile in the pair of backward kernels of `pallas_flash` on Hopper.

Both kernels multiply S and dP, compute weights and dS from these, and multiply the results. They do so a few columns at
a time: the tensor cores multiply the first columns while the next ones are computed. dP's product runs while the first
weights are computed.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import async_product, tiles
from vitkernels.attention.pallas_flash.hopper.async_product import STEP
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, transposed

_DQ_COLUMNS = 32  # that are computed at a time; with 16 or 64, dq's kernel is up to 3 % slower


def _product(weights: jax.Array, dp: jax.Array, _first: int) -> jax.Array:
    return weights * dp


class StreamedTile(NamedTuple):
    """A tile of streamed rows: keys for dq, queries for dk and dv."""

    # What the products of S and dP start from; None for zeros. That of dP gives the columns: the tile's first rows.
    starts: tuple[jax.Array | None, jax.Array]
    parts: tuple[tuple, tuple]  # K and V, or Q and dO, in shared memory; see async_product.ring
    weights_of: Callable[[jax.Array, int], jax.Array]  # from S, of columns from the last argument on; in float32
    ds_of: Callable[[jax.Array, jax.Array, int], jax.Array] = _product  # the same for dS, from weights and dP

    @property
    def columns(self) -> int:
        _, start_of_dp = self.starts
        return start_of_dp.shape[1]


def add_query_gradient(
    dq: tuple,
    queries: tuple[tuple, tuple],
    streamed: tuple[StreamedTile, ...],
    after_scores: Callable[[], None],
    rows: int,
    dtype: str,
    interpret: bool,
) -> tuple:
    """Return dq with the products of tiles of keys added, one sum per part of K.

    Args:
        dq: in float32.
        queries: the groups of Q and of dO, in registers or in shared memory.
        streamed: tiles of keys, whose products S = Q Kᵀ and dP = dO Vᵀ are all started first.
        after_scores: called when S has been multiplied.
        rows: of a tile in shared memory.
    """

    def add(all_scores, wait_for_dp):
        after_scores()
        total, all_dp = dq, None
        for i, first, end in _ranges(streamed, lambda columns: _DQ_COLUMNS):
            tile, (k, _) = streamed[i], streamed[i].parts
            weights = tile.weights_of(all_scores[i][:, first:end], first)
            all_dp = wait_for_dp(0) if all_dp is None else all_dp
            ds = tile.ds_of(weights, all_dp[i][:, first:end], first)
            total = async_product.start(total, async_product.operand(ds, dtype), k, interpret, first)
        return async_product.finish(total, interpret)

    return _with_products(queries, streamed, rows, add, interpret)


def add_key_gradients(
    sums: tuple[tuple, tuple],
    keys: tuple[tuple, tuple],
    streamed: tuple[StreamedTile, ...],
    after_scores: Callable[[], None],
    rows: int,
    dtype: str,
    interpret: bool,
) -> tuple[tuple, tuple]:
    """Return dk and dv with the products of tiles of queries added: transposed, so that the keys are rows.

    dv's products run while dS is computed.

    Args:
        sums: dk and dv, in float32, one sum per part of Q and of dO.
        keys: the groups of K and of V, in registers or in shared memory.
        streamed: tiles of queries, whose products S = K Qᵀ and dP = V dOᵀ are all started first.
        after_scores: called when S has been multiplied.
        rows: of a tile in shared memory.
    """
    # Two for each tile, or one of few columns.
    ranges = _ranges(streamed, lambda columns: pl.cdiv(columns, 2 * STEP) * STEP)

    def add(all_scores, wait_for_dp):
        after_scores()
        (dk, dv), weights, started = sums, [], 0
        for i, first, end in ranges:
            tile, (_, do) = streamed[i], streamed[i].parts
            weights.append(tile.weights_of(all_scores[i][:, first:end], first))
            dv = async_product.start(dv, async_product.operand(weights[-1], dtype), do, interpret, first)
            started += len(do)
        all_dp = wait_for_dp(started)
        for (i, first, end), some in zip(ranges, weights, strict=True):
            tile, (q, _) = streamed[i], streamed[i].parts
            ds = tile.ds_of(some, all_dp[i][:, first:end], first)
            dk = async_product.start(dk, async_product.operand(ds, dtype), q, interpret, first)
        return async_product.finish(dk, interpret), async_product.finish(dv, interpret)

    return _with_products(keys, streamed, rows, add, interpret)


def _ranges(streamed: tuple[StreamedTile, ...], width_of: Callable[[int], int]) -> list[tuple[int, int, int]]:
    """Divide the tiles' columns: return tile, first column and end of each range."""
    ranges = []
    for i, tile in enumerate(streamed):
        width = width_of(tile.columns)
        ranges += [(i, first, min(first + width, tile.columns)) for first in range(0, tile.columns, width)]
    return ranges


def _with_products(own, streamed: tuple[StreamedTile, ...], rows: int, add: Callable, interpret: bool) -> tuple:
    """Multiply S and dP of each tile, and return add(S, wait_for_dp), with a list of S.

    wait_for_dp(n) returns a list of dP, n products started after it.
    """
    terms = [
        (tile.starts[which], own[which], async_product.groups(tile.parts[which], rows, tile.columns))
        for which in range(2)
        for tile in streamed
    ]
    if interpret:  # the interpreter does not support accumulators that are read before all products end
        found = tiles.products(*terms, interpret=True)
        return add(found[: len(streamed)], lambda _: found[len(streamed) :])

    def chain(*refs):
        for ref, (start, *_) in zip(refs, terms, strict=True):
            if start is not None:
                ref[...] = start.astype(jnp.float32)
        for ref, (_, a_groups, b_groups) in zip(refs, terms, strict=True):
            for a, b in zip(a_groups, b_groups, strict=True):
                plgpu.wgmma(ref, a, transposed(b))

        def load(some_refs, started):
            return [plgpu.wgmma_accumulator_load(ref, wait_n=started) for ref in some_refs]

        of_scores, of_dp = refs[: len(streamed)], refs[len(streamed) :]
        return add(load(of_scores, len(of_dp) * len(own[1])), lambda started: load(of_dp, started))

    shapes = [(ROWS, tile.columns) for _ in range(2) for tile in streamed]
    return pl.run_scoped(chain, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))
