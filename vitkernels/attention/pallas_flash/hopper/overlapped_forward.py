"""The forward kernel of `pallas_flash` on Hopper that computes the softmax while it multiplies weights and values.

A step computes the scores of one tile of keys, and adds the product of the previous tile's weights and values to the
output. While that product runs, the warpgroup computes the weights of its own tile (FlashAttention-3, Shah et al. 2024,
arXiv 2407.08608, section 3.2). On an H200, that takes less time than `Forward` (notes/pallas_flash_long.md). Tiles in
which ids must be compared do not overlap.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import async_product, groups, tiles
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.schedule import FEW_KEYS, MANY_TILES, widths
from vitkernels.attention.pallas_flash.hopper.tiles import BY_COLUMN, BY_ROW, ROWS, at, transposed
from vitkernels.attention.pallas_flash.hopper.work_items import WorkItem

# A last tile that is processed first shares a step with the next tile if it has at most FEW_KEYS keys, or at most these
# beside a tile of more than 128. With more keys, the two exceed the registers.
_FEW_BESIDE_MORE = 16


class Queries(NamedTuple):
    """A warpgroup's queries of a work item, and what it needs to attend with them."""

    item: WorkItem
    warpgroup: Any
    first: Any  # the first query
    smem: tuple  # the queries, in parts
    ids: Any  # None where none were copied to shared memory
    after_first_tile: Callable  # see RingKernel.divide_roles
    scratch: dict


class OverlappedForward(Forward):
    """The kernel of one call; see the module.

    "Sums" are the output, the maximum and the sum of weights of the tiles so far. A "carry" begins with the weights of
    a tile whose product with the values is not yet in the output, followed by the sums.
    """

    # Where items keep to segments, a segment's last tile compares no ids. If that of other batch entries was narrowed,
    # ptxas would spill.
    compared_widths = ()

    # --- weights and values -------------------------------------------------------------------------------------------

    def ring_of_values(self) -> tuple:
        return self.ring_for_products()

    def zeros(self) -> tuple:
        return async_product.zeros(self.head_dim)

    def rounded(self, weights):
        return async_product.operand(weights, self.dtype)

    def with_values(self, out: tuple, weights, slot, scratch) -> tuple:
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        out = async_product.start(out, weights, at(scratch["v_smem"], slot), self.interpret)
        out = async_product.finish(out, self.interpret)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot])
        return out

    def finalize(self, out, highest, total) -> tuple:
        out, lse = super().finalize(out, highest, total)
        return async_product.by_group(out), lse

    # --- ids and the order of tiles -----------------------------------------------------------------------------------

    @property
    def copies_ids(self) -> bool:
        """Return whether ids are copied to shared memory ahead of their use.

        Where items keep to segments, only batch entries whose chunks were not moved compare ids. So the loader leaves
        these to the compute warpgroups.
        """
        return self.has_ids and not self.keeps_to_segments

    def ids_of_keys(self, item, slot, first_key, columns: int, scratch):
        if self.copies_ids:
            return super().ids_of_keys(item, slot, first_key, columns, scratch)
        _, keys = scratch["sides"]
        ids = keys.ids.at[item.batch, pl.ds(first_key, columns)]
        return plgpu.load(ids, layout=BY_COLUMN, optimized=False)

    @property
    def _few_keys(self) -> int:
        return FEW_KEYS if self.schedule.tile <= 2 * ROWS else _FEW_BESIDE_MORE

    @property
    def _starts_with_last(self) -> bool:
        """Return whether the first step processes the last tile, if that is not full; see MANY_TILES.

        In the first step, registers are free for the mask of its columns. And no step follows the loop over full tiles.
        """
        full, rest = divmod(self.keys, self.schedule.tile)
        return not self.has_ids and rest > 0 and (full >= MANY_TILES or 2 * rest > self.schedule.tile)

    def tile_of_step(self, item: WorkItem, step):
        if not self._starts_with_last:
            return super().tile_of_step(item, step)
        return jnp.where(step == 0, item.steps - 1, step - 1)

    def _over_keys(self, item, warpgroup, q_smem, first_query, ids, after_first_tile, scratch):
        queries = Queries(item, warpgroup, first_query, q_smem, ids, after_first_tile, scratch)
        if self.keeps_to_segments:
            ways = partial(self._over_segment, queries), partial(self._over_unmoved, queries)
            return lax.cond(item.uncompared > 0, *ways)
        return self._over_masked(queries) if self.has_ids else self._over_all(queries)

    def _over_all(self, queries: Queries) -> tuple:
        """Return the sums of a call without ids."""
        full, rest = divmod(self.keys, self.schedule.tile)
        assert full, "the first tile would be processed as a full one"
        if self._starts_with_last:
            if rest <= self._few_keys:
                begun, carry = 2, self._start_with_two(queries, rest)
            else:
                begun, carry = 1, self._start(queries, rest)
            return self._finished(queries, full, self._over_full(queries, carry, begun, full + 1))
        carry = self._over_full(queries, self._start(queries), 1, full)
        of_full = lambda: self._finished(queries, full - 1, carry)  # noqa: E731
        if not rest:
            return of_full()
        # With a branch that the compiler does not know to be taken, ptxas spills less. As the step of a loop, the last
        # tile would keep two tiles' weights in registers.
        return lax.cond(self.opaque(1) > 0, self._rest_of(queries, full, carry, self.columns_of(rest), rest), of_full)

    def _rest_of(self, queries: Queries, full, carry: tuple, columns: int, count) -> Callable:
        """Return a function that returns the sums with the `count` keys, in these columns, behind the full tiles."""
        return lambda: self._finished(queries, full, self._add(queries, full, carry, columns, count))

    # --- segments and masks -------------------------------------------------------------------------------------------

    def _over_segment(self, queries: Queries) -> tuple:
        """Return the sums of a segment: of its full tiles, of which there is one at least, and of the rest.

        No ids are compared: of the last tile, the first item.last keys are the segment's.
        """
        full, rest = queries.item.uncompared, queries.item.last
        carry = self._over_full(queries, self._start(queries), 1, full)
        add = self._rest_of(queries, full, carry, self.schedule.tile, rest)
        for width in self.narrow_widths:
            add = partial(lax.cond, rest <= width, self._rest_of(queries, full, carry, width, rest), add)
        return lax.cond(queries.item.steps > full, add, lambda: self._finished(queries, full - 1, carry))

    def _over_unmoved(self, queries: Queries) -> tuple:
        """Return the sums of an item of a batch entry whose chunks do not start at segments: all ids are compared."""
        own, _ = queries.scratch["sides"]
        rows = own.ids.at[queries.item.batch, pl.ds(queries.first, ROWS)]
        queries = queries._replace(ids=plgpu.load(rows, layout=BY_ROW, optimized=False))
        return self._over_compared(queries, self.initial_carry())

    def _over_masked(self, queries: Queries) -> tuple:
        """Return the sums of an item of any other call with ids: the last tiles compare them."""
        count = queries.item.uncompared

        def over_uncompared():
            return self._finished(queries, count - 1, self._over_full(queries, self._start(queries), 1, count))

        return self._over_compared(queries, lax.cond(count > 0, over_uncompared, self.initial_carry))

    def _over_compared(self, queries: Queries, sums: tuple) -> tuple:
        """Return the sums with all tiles in which ids must be compared."""
        step_of = lambda step, sums, keys, _: self._next_sums(queries, step, sums, keys, ids=queries.ids)  # noqa: E731
        return self.over_compared_tiles(queries.item, step_of, sums, queries.after_first_tile)

    # --- steps --------------------------------------------------------------------------------------------------------

    @property
    def _pinned(self) -> int | None:
        """Return how many groups of a full tile's weights have pinned sums (see groups.pin); None if none has.

        What was fastest at most lengths of a kind (notes/pallas_flash_long.md).
        """
        tile = self.schedule.tile
        rest = self.keys % tile
        if len(widths(self.head_dim)) > 1:
            return 6 if tile > 2 * ROWS else 2 if rest or self.has_ids else None
        if self.has_ids or 0 < rest <= self._few_keys:
            return 2
        return tile // groups.COLUMNS if rest == 0 or self._starts_with_last else None

    def _next_sums(self, queries: Queries, step, sums: tuple, keys: int, ids) -> tuple:
        """Return the sums with the first `keys` keys of a tile, whose ids are compared, without overlap."""
        where = queries.item, queries.warpgroup, queries.smem, queries.first
        return self._step(*where, ids, step, keys, sums, queries.scratch)

    def _start(self, queries: Queries, count=None) -> tuple:
        """Return the carry of the first step's tile, of which the first `count` keys get weights, or all."""
        tile, slot, scratch = self.schedule.tile, self.slot(queries.item, 0), queries.scratch
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        (scores,) = tiles.products((None, queries.smem, self._keys(slot, tile, scratch)), interpret=self.interpret)
        plgpu.barrier_arrive(scratch["k_consumed"].at[slot])
        carry = self.softmax_step(scores, queries.first, 0, tile, self.initial_carry(), count=count)
        queries.after_first_tile()
        return carry

    def _start_with_two(self, queries: Queries, count: int) -> tuple:
        """Return the carry of the first step's tile, which has `count` keys, and of the next one, which is full."""
        tile, scratch, slots = self.schedule.tile, queries.scratch, [self.slot(queries.item, step) for step in (0, 1)]
        for slot in slots:
            plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        columns = self.columns_of(count), tile
        keys = [self._keys(slot, n, scratch) for slot, n in zip(slots, columns, strict=True)]
        few, many = tiles.products(*((None, queries.smem, k) for k in keys), interpret=self.interpret)
        for slot in slots:
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot])
        carry = self.softmax_step(few, queries.first, 0, columns[0], self.initial_carry(), count=count)
        carry = self.softmax_step(many, queries.first, 0, tile, self._finished(queries, 0, carry))
        queries.after_first_tile()
        return carry

    def _over_full(self, queries: Queries, carry: tuple, first: int, end) -> tuple:
        """Return the carry with the full tiles of the steps from `first` on, before `end`."""
        # A loop whose end the compiler does not know: otherwise, ptxas spills. See ring.over_tiles.
        add = lambda step, carry: self._add(queries, step, carry, self.schedule.tile)  # noqa: E731
        return lax.fori_loop(first, self.opaque(end), add, carry)

    def _add(self, queries: Queries, step, carry: tuple, columns: int, count=None) -> tuple:
        """Return the carry with the weights of a tile's first keys, and with the product of the tile before.

        columns: how many the scores have. count: if given, only so many keys get weights.
        """
        weights, out, *statistics = carry
        slot_of, scratch = partial(self.slot, queries.item), queries.scratch
        pinned = self._pinned if count is None else None
        plgpu.barrier_wait(scratch["k_arrived"].at[slot_of(step)])

        def weigh(scores):
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot_of(step)])
            return self.weigh(scores, queries.first, 0, columns, statistics, count=count, pinned=pinned)

        wait = lambda: plgpu.barrier_wait(scratch["v_arrived"].at[slot_of(step - 1)])  # noqa: E731
        k = self._keys(slot_of(step), columns, scratch)
        v = at(scratch["v_smem"], slot_of(step - 1))
        carry = self._overlapped(queries.smem, k, weigh, weights, v, wait, out)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot_of(step - 1)])
        return carry

    def _keys(self, slot, count: int, scratch) -> tuple:
        """Return the first `count` keys of a streamed tile."""
        return tiles.first_rows(at(scratch["k_smem"], slot), count)

    def _finished(self, queries: Queries, step, carry: tuple) -> tuple:
        """Return the sums with the product of the carry's weights and the values of their tile."""
        weights, out, *statistics = carry
        out = self.with_values(out, weights, self.slot(queries.item, step), queries.scratch)
        return out, *statistics

    def _overlapped(self, q, k, weigh: Callable, weights, v, wait_for_values: Callable, out) -> tuple:
        """Multiply q and k, and add the product of weights and v to out; compute the new weights meanwhile.

        Return the new rounded weights, out rescaled for these, and their maximum and sum.

        weigh: weigh(scores) returns what Forward.weigh returns.
        """

        def finished(started, new_weights, shrink, *statistics):
            new_out = async_product.finish(started, self.interpret)
            return self.rounded(new_weights), self.rescaled(new_out, shrink), *statistics

        if self.interpret:  # the interpreter does not support accumulators that are read before all products end
            (scores,) = tiles.products((None, q, k), interpret=True)
            weighed = weigh(scores)
            wait_for_values()
            return finished(async_product.start(out, weights, v, interpret=True), *weighed)

        def chain(scores_ref):
            for a, b in zip(q, k, strict=True):
                plgpu.wgmma(scores_ref, a, transposed(b))
            wait_for_values()
            started = async_product.start(out, weights, v, interpret=False)
            return finished(started, *weigh(plgpu.wgmma_accumulator_load(scores_ref, wait_n=len(v))))

        return pl.run_scoped(chain, plgpu.ACC((ROWS, k[0].shape[0]), jnp.float32))
