"""The forward kernel of `pallas_flash` on Hopper that computes the softmax while it multiplies weights and values.

A step computes the scores of one tile of keys, and adds the product of the previous tile's weights and values to the
output. While that product runs, the warpgroup computes the weights of its own tile (FlashAttention-3, Shah et al. 2024,
arXiv 2407.08608, section 3.2). On an H200, that takes 3 to 8 % less time than `Forward` at most lengths, and about as
much at others. Tiles in which ids must be compared do not overlap.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.tiles import BY_ROW, ROWS, at, transposed

# From so many full tiles on, pinned weights are faster: at 12, but not at 10 (H200). With ids, they are at 4, 8 and 18,
# but not at 7 (1.01 instead of 0.98 of Forward's time).
_PINNED_TILES = 12


class OverlappedForward(Forward):
    """The kernel of one call; see the module."""

    def _over_keys(self, item, warpgroup, q_smem, first_query, ids, after_first_tile, scratch):
        tile, slot_of = self.schedule.tile, lambda step: self.slot(item, step)
        full, rest = divmod(self.keys, tile)
        pins = self.has_ids or full >= _PINNED_TILES
        assert self.has_ids or full, "the first tile has code of its own"

        def add(step, carry, keys, count=None):
            """Return the carry with the weights of `keys` keys, and with the products of the tile before.

            count: if given, only the first of these keys get weights.
            """
            weights, out, *statistics = carry
            columns = self.columns_of(keys)
            plgpu.barrier_wait(scratch["k_arrived"].at[slot_of(step)])
            k, v = self._rows("k", slot_of(step), columns, scratch), self._rows("v", slot_of(step - 1), tile, scratch)

            def weigh(scores):
                plgpu.barrier_arrive(scratch["k_consumed"].at[slot_of(step)])
                # With ids, item.first may not be 0, but then no tile here is masked.
                return self.weigh(scores, first_query, step * tile, keys, statistics, count=count)

            wait = lambda: plgpu.barrier_wait(scratch["v_arrived"].at[slot_of(step - 1)])  # noqa: E731
            carry = self._overlapped(q_smem, k, weigh, pins and count is None, weights, v, wait, out)
            plgpu.barrier_arrive(scratch["v_consumed"].at[slot_of(step - 1)])
            return carry

        def over_first(count):
            """Return the carry of the first `count` full tiles, at least one, with the weights of the last of these."""
            plgpu.barrier_wait(scratch["k_arrived"].at[slot_of(0)])
            k = self._rows("k", slot_of(0), tile, scratch)
            (scores,) = tiles.products((None, q_smem, (k,)), interpret=self.interpret)
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot_of(0)])
            carry = self.softmax_step(scores, first_query, 0, tile, self.initial_carry())
            after_first_tile()
            # A loop whose end the compiler does not know: otherwise, ptxas spills. See ring.over_tiles.
            return lax.fori_loop(1, self.opaque(count), lambda step, carry: add(step, carry, tile), carry)

        with_values = lambda step, carry: self._with_values(slot_of(step), carry, scratch)  # noqa: E731

        def step_of(step, carry, keys, compares, count=None):
            own_ids = ids if compares else None
            return self._step(item, warpgroup, q_smem, first_query, own_ids, step, keys, carry, scratch, count)

        def add_last(step, carry):
            if pins:  # with pinned weights, a masked step that overlaps exceeds the registers
                sums = step_of(step, with_values(step - 1, carry), rest, False)
            else:
                sums = with_values(step, add(step, carry, rest))
            return carry[0], *sums  # of constant shapes

        def over_segment(full):
            """Return the sums of an item of a segment: of `full` full tiles, and of one more if it has that.

            No ids are compared: of the last tile, the first item.last keys are the segment's.
            """
            carry, rest = over_first(full), item.last
            is_wide = (item.steps > full) & (rest > self.narrow_widths[0])
            with_rest = lambda: with_values(full, add(full, carry, tile, rest))  # noqa: E731
            sums = lax.cond(is_wide, with_rest, lambda: with_values(full - 1, carry))
            # A narrow tile is faster without overlap.
            start = full + is_wide.astype(jnp.int32)
            for width, narrower in zip(self.narrow_widths, (*self.narrow_widths[1:], 0), strict=True):
                end = lax.max(start, item.steps - (rest <= narrower).astype(jnp.int32))
                step = lambda step, sums, width=width: step_of(step, sums, width, False, rest)  # noqa: E731
                start, sums = end, lax.fori_loop(start, end, step, sums)
            return sums

        def over_compared():
            """Return the sums of an item of an entry whose chunks were not moved."""
            return self.over_compared_tiles(item, step_of, self.initial_carry(), after_first_tile, narrow_widths=())

        if self.has_ids:
            count = item.uncompared
            if self.keeps_to_segments:
                return lax.cond(count > 0, lambda: over_segment(count), over_compared)
            over_uncompared = lambda: with_values(count - 1, over_first(count))  # noqa: E731
            sums = lax.cond(count > 0, over_uncompared, self.initial_carry)
            return self.over_compared_tiles(item, step_of, sums, after_first_tile)
        if not rest:
            return with_values(full - 1, over_first(full))
        _, *sums = lax.fori_loop(full, self.opaque(full + 1), add_last, over_first(full))
        return tuple(sums)

    def _rows(self, name: str, slot, count: int, scratch):
        """Return the first `count` rows of a streamed tile."""
        (rows,) = tiles.first_rows(at(scratch[f"{name}_smem"], slot), count)
        return rows

    def _with_values(self, slot, carry, scratch) -> tuple:
        """Return output, maximum and sum with the product of the carry's weights and the values in a slot."""
        weights, out, *statistics = carry
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
