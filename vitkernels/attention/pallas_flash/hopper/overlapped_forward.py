"""The forward kernel of `pallas_flash` on Hopper that computes the softmax while it multiplies weights and values.

A step computes the scores of one tile of keys, and adds the product of the previous tile's weights and values to the
output. While that product runs, the warpgroup computes the weights of its own tile (FlashAttention-3, Shah et al. 2024,
arXiv 2407.08608, section 3.2). On an H200, that takes 3 to 8 % less time than `Forward` at most lengths, and about as
much at others. Tiles in which ids must be compared do not overlap, nor does a narrow last tile of a packed segment.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.tiles import BY_COLUMN, BY_ROW, ROWS, at, transposed
from vitkernels.attention.pallas_flash.hopper.work_items import WorkItem

# From so many full tiles on, pinned weights are faster: at 12, but not at 10 (H200). With packed segments of 320 to
# 2304 tokens, they take 0.98 to 1.01 of the time of others.
_PINNED_TILES = 12


class Queries(NamedTuple):
    """A warpgroup's queries of a work item, and what it needs to attend with them."""

    item: WorkItem
    warpgroup: Any
    first: Any  # the first query
    smem: tuple  # the queries, one part
    ids: Any  # None where none were copied to shared memory
    after_first_tile: Callable  # see RingKernel.divide_roles
    scratch: dict


class OverlappedForward(Forward):
    """The kernel of one call; see the module.

    "Sums" are the output, the maximum and the sum of weights of the tiles so far. A "carry" begins with the weights of
    a tile whose product with the values is not yet in the output, followed by the sums.
    """

    # A segment's last tile compares no ids. If that of other entries was narrowed when it does, ptxas would spill.
    compared_widths = ()

    @property
    def copies_ids(self) -> bool:
        """Of packed segments, only batch entries whose chunks were not moved compare ids: the loader has less to do."""
        return self.has_ids and not self.keeps_to_segments

    def ids_of_keys(self, item, slot, first_key, columns: int, scratch):
        if self.copies_ids:
            return super().ids_of_keys(item, slot, first_key, columns, scratch)
        _, keys = scratch["sides"]
        ids = keys.ids.at[item.batch, pl.ds(first_key, columns)]
        return plgpu.load(ids, layout=BY_COLUMN, optimized=False)

    def _over_keys(self, item, warpgroup, q_smem, first_query, ids, after_first_tile, scratch):
        queries = Queries(item, warpgroup, first_query, q_smem, ids, after_first_tile, scratch)
        if self.keeps_to_segments:
            ways = partial(self._over_segment, queries), partial(self._over_unmoved, queries)
            return lax.cond(item.uncompared > 0, *ways)
        if self.has_ids:
            return self._over_masked(queries)
        full, rest = divmod(self.keys, self.schedule.tile)
        assert full, "the first tile has code of its own"
        if not rest:
            return self._with_values(queries, full - 1, self._over_full(queries, full))

        def add_last(step, carry):
            if self._pins:  # with pinned weights, a masked step that overlaps exceeds the registers
                sums = self._with_values(queries, step - 1, carry)
                sums = self._next_sums(queries, step, sums, rest)
            else:
                sums = self._with_values(queries, step, self._add(queries, step, carry, rest))
            return carry[0], *sums  # of constant shapes

        _, *sums = lax.fori_loop(full, self.opaque(full + 1), add_last, self._over_full(queries, full))
        return tuple(sums)

    # --- segments and masks -------------------------------------------------------------------------------------------

    def _over_segment(self, queries: Queries) -> tuple:
        """Return the sums of a segment: of its full tiles, of which there is one at least, and of the rest.

        No ids are compared: of the last tile, the first item.last keys are the segment's.
        """
        item, full, rest = queries.item, queries.item.uncompared, queries.item.last
        carry = self._over_full(queries, full)

        def with_rest():
            return self._with_values(queries, full, self._add(queries, full, carry, self.schedule.tile, rest))

        is_wide = (item.steps > full) & (rest > self.narrow_widths[0])
        sums = lax.cond(is_wide, with_rest, lambda: self._with_values(queries, full - 1, carry))
        # A narrow tile is faster without overlap.
        start = full + is_wide.astype(jnp.int32)
        for width, narrower in zip(self.narrow_widths, (*self.narrow_widths[1:], 0), strict=True):
            end = lax.max(start, item.steps - (rest <= narrower).astype(jnp.int32))
            step = partial(self._next_sums, queries, keys=width, count=rest)
            start, sums = end, lax.fori_loop(start, end, step, sums)
        return sums

    def _over_unmoved(self, queries: Queries) -> tuple:
        """Return the sums of an item of a batch entry whose chunks do not start at segments: all ids are compared."""
        own, _ = queries.scratch["sides"]
        rows = own.ids.at[queries.item.batch, pl.ds(queries.first, ROWS)]
        queries = queries._replace(ids=plgpu.load(rows, layout=BY_ROW, optimized=False))
        return self._over_compared(queries, self.initial_carry())

    def _over_masked(self, queries: Queries) -> tuple:
        """Return the sums of an item of a call whose chunks lie at multiples of 64: the last tiles compare ids."""
        count = queries.item.uncompared
        over_uncompared = lambda: self._with_values(queries, count - 1, self._over_full(queries, count))  # noqa: E731
        return self._over_compared(queries, lax.cond(count > 0, over_uncompared, self.initial_carry))

    def _over_compared(self, queries: Queries, sums: tuple) -> tuple:
        """Return the sums with all tiles in which ids must be compared."""
        step_of = lambda step, sums, keys, _: self._next_sums(queries, step, sums, keys, ids=queries.ids)  # noqa: E731
        return self.over_compared_tiles(queries.item, step_of, sums, queries.after_first_tile)

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def _pins(self) -> bool:
        return self.has_ids or self.keys // self.schedule.tile >= _PINNED_TILES

    def _next_sums(self, queries: Queries, step, sums: tuple, keys: int, count=None, ids=None) -> tuple:
        """Return the sums with the first `keys` keys of a tile, or `count` of these, without overlap."""
        where = queries.item, queries.warpgroup, queries.smem, queries.first
        return self._step(*where, ids, step, keys, sums, queries.scratch, count)

    def _over_full(self, queries: Queries, count) -> tuple:
        """Return the carry of the first `count` full tiles, at least one."""
        tile, slot_of, scratch = self.schedule.tile, partial(self.slot, queries.item), queries.scratch
        plgpu.barrier_wait(scratch["k_arrived"].at[slot_of(0)])
        (scores,) = tiles.products(
            (None, queries.smem, (self._rows("k", slot_of(0), tile, scratch),)), interpret=self.interpret
        )
        plgpu.barrier_arrive(scratch["k_consumed"].at[slot_of(0)])
        carry = self.softmax_step(scores, queries.first, 0, tile, self.initial_carry())
        queries.after_first_tile()
        # A loop whose end the compiler does not know: otherwise, ptxas spills. See ring.over_tiles.
        return lax.fori_loop(1, self.opaque(count), lambda step, carry: self._add(queries, step, carry, tile), carry)

    def _add(self, queries: Queries, step, carry: tuple, keys: int, count=None) -> tuple:
        """Return the carry with the weights of `keys` keys of a tile, and with the product of the tile before.

        count: if given, only the first of these keys get weights.
        """
        weights, out, *statistics = carry
        tile, slot_of, scratch = self.schedule.tile, partial(self.slot, queries.item), queries.scratch
        plgpu.barrier_wait(scratch["k_arrived"].at[slot_of(step)])
        k = self._rows("k", slot_of(step), self.columns_of(keys), scratch)
        v = self._rows("v", slot_of(step - 1), tile, scratch)

        def weigh(scores):
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot_of(step)])
            # With ids, item.first may not be 0, but then no tile here is masked by the number of its first key.
            return self.weigh(scores, queries.first, step * tile, keys, statistics, count=count)

        wait = lambda: plgpu.barrier_wait(scratch["v_arrived"].at[slot_of(step - 1)])  # noqa: E731
        carry = self._overlapped(queries.smem, k, weigh, self._pins and count is None, weights, v, wait, out)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot_of(step - 1)])
        return carry

    def _rows(self, name: str, slot, count: int, scratch):
        """Return the first `count` rows of a streamed tile."""
        (rows,) = tiles.first_rows(at(scratch[f"{name}_smem"], slot), count)
        return rows

    def _with_values(self, queries: Queries, step, carry: tuple) -> tuple:
        """Return the sums with the product of the carry's weights and the values of their tile."""
        weights, out, *statistics = carry
        slot, scratch = self.slot(queries.item, step), queries.scratch
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        v = self._rows("v", slot, weights.shape[1], scratch)
        out = tiles.accumulated(out, [(0, weights, v)], self.interpret)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot])
        return out, *statistics

    def _overlapped(self, q, k, weigh, pins: bool, weights, v, wait_for_values, out) -> tuple:
        """Multiply q and k, and add the product of weights and v to out; compute the new weights meanwhile.

        Return the new rounded weights, out rescaled for these, and their maximum and sum.

        weigh: weigh(scores) returns what Forward.weigh returns.
        pins: whether to force the order of the instructions; see _pin.
        """
        if self.interpret:  # the interpreter does not support operands in registers
            (scores,) = tiles.products((None, q, (k,)), interpret=True)
            new_weights, shrink, *statistics = weigh(scores)
            wait_for_values()
            out = tiles.accumulated(out, [(0, weights, v)], interpret=True)
            return self.rounded(new_weights), self.rescaled(out, shrink), *statistics

        def chain(scores_ref, out_ref):
            out_ref[...] = out[0]
            plgpu.wgmma(scores_ref, q[0], transposed(k))
            wait_for_values()
            plgpu.wgmma(out_ref, weights, v)
            new_weights, shrink, *statistics = weigh(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            if pins:
                _pin(statistics[-1])
            return self.rounded(new_weights), self.rescaled((out_ref[...],), shrink), *statistics

        accumulators = (plgpu.ACC(shape, jnp.float32) for shape in ((ROWS, k.shape[0]), out[0].shape))
        return pl.run_scoped(chain, *accumulators)


@plgpu.inline_mgpu(arg_types=(BY_ROW,))
def _pin(_ctx, totals):
    """Have sums of weights, and so the weights, computed before the wait for products that follows.

    ptxas may move them behind it, where they would not overlap. It does not move stores, and does not know that this
    one is never executed, as no sum is negative.
    """
    store = "{ .reg .pred p; .reg .b32 a; mov.b32 a, 0; setp.lt.f32 p, $0, 0f00000000; @p st.shared.f32 [a], $0; }"
    for register in totals.registers.flat:
        mgpu.utils.inline_ptx(store, mgpu.utils.vector.extract(register, [], [0]), has_side_effects=True)
