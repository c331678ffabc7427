"""The forward kernel of `pallas_flash` on Hopper: TMA, wgmma, online softmax.

Own rows are queries, 64 per compute warpgroup; tiles of keys and values stream through the ring.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import PADDING
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows, RingKernel
from vitkernels.attention.pallas_flash.hopper.row_registers import first_columns
from vitkernels.attention.pallas_flash.hopper.tiles import BY_COLUMN, BY_ROW, LOG2E, ROWS, WGMMA, along_rows, at, filled

LOWEST = -1e30  # below every score, but finite, so that a tile without keys for a query gives no NaN


class Forward(RingKernel):
    """The forward kernel: call it with JAX arrays, or compile it with vitkernels.bridge.mosaic_gpu.Kernel."""

    narrow_widths = 64, 16  # see columns_of

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, *extras):
        """Return out (B, N, H, D) and log-sum-exp in log2 units (B, H, padded N); +inf for a query without keys.

        extras: with bias_shape, the bias; see padded_bias. Then, with has_ids, what `token_ids` returns; log-sum-exp is
            then (B, H, 64 Q), in the order of the chunks.
        """
        scratch = {
            "q_smem": self.own_tiles(),
            "k_smem": self.ring(),
            "v_smem": self.ring_of_values(),
            "q_arrived": self.own_arrived(self.copies + self.copies_ids),
            "q_consumed": self.own_consumed(),
            "k_arrived": self.arrived(self.tile_copies + self.copies_ids),
            "v_arrived": self.arrived(self.tile_copies),
            "k_consumed": self.consumed(),
            "v_consumed": self.consumed(),
        }
        scratch |= self.bias_scratch()
        if self.copies_ids:
            scratch |= {"q_ids_smem": self.own_ids(), "k_ids_smem": self.ring_of_ids()}
        kernel = self.kernel(self._body, self.queries, (self.rows(self.queries, self.heads), self.vector()), scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, *extras)

    def ring_of_values(self) -> tuple:
        """Return scratch for the streamed tiles of values."""
        return self.ring()

    @property
    def copies_ids(self) -> bool:
        """Return whether ids are copied to shared memory ahead of their use."""
        return self.has_ids

    @property
    def steps(self) -> int:
        return pl.cdiv(self.keys, self.schedule.tile)

    def _body(self, q_ref, k_ref, v_ref, *refs, **scratch):
        bias_ref, ids, (out_ref, lse_ref) = self.extras(refs)
        scratch["bias_ref"] = bias_ref
        queries, keys = scratch["sides"] = self.sides(ids)

        def load_queries(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            q_smem, arrived = scratch["q_smem"], scratch["q_arrived"].at[owner]
            if self.copies_ids:
                rows = queries.ids.at[item.batch, pl.ds(first, ROWS)]
                plgpu.copy_gmem_to_smem(rows, scratch["q_ids_smem"].at[owner], arrived)
            row = self.own_row(item, queries, first)
            tiles.load_rows(q_ref, item.batch, row, self.heads_of(item)[0], q_smem, owner, arrived, self.interpret)

        def stream(ref, which, name):
            smem, arrived, consumed = (scratch[f"{name}_{kind}"] for kind in ("smem", "arrived", "consumed"))

            def load(item, tile, slot):
                head, first = self.heads_of(item)[which], tile * self.schedule.tile
                if self.copies_ids and name == "k":
                    rows = keys.ids.at[item.batch, pl.ds(first, self.schedule.tile)]
                    plgpu.copy_gmem_to_smem(rows, scratch["k_ids_smem"].at[slot], arrived.at[slot])
                self.load_tile(ref, item, keys, tile, head, smem, slot, arrived.at[slot])

            return self.stream(load, arrived, consumed)

        self.divide_roles(
            queries,
            lambda item: self._with_span(item, queries, keys),
            OwnRows(load_queries, (scratch["q_arrived"],), scratch["q_consumed"]),
            [stream(k_ref, 1, "k"), stream(v_ref, 2, "v"), *self.bias_streams(scratch)],
            lambda *where: self._attend(*where, out_ref, lse_ref, scratch),
            scratch,
        )

    def _with_span(self, item, queries, keys):
        """Return with_span for the keys that the item's queries attend to."""
        item = self.with_span(item, queries, keys)
        if not self.is_causal:
            return item
        seen = (item.chunk + item.chunks) * ROWS
        end = lax.min(lax.div(seen + self.schedule.tile - 1, self.schedule.tile), item.first + item.steps)
        steps = lax.max(end - item.first, 0)
        return item._replace(steps=steps, uncompared=lax.min(item.uncompared, steps))

    def _attend(self, item, warpgroup, after_first_tile, out_ref, lse_ref, scratch):
        owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        q_smem = at(scratch["q_smem"], owner)
        plgpu.barrier_wait(scratch["q_arrived"].at[owner])
        queries, _ = scratch["sides"]
        ids = plgpu.load(scratch["q_ids_smem"].at[owner], layout=BY_ROW) if self.copies_ids else None
        out, lse = self.finalize(*self._over_keys(item, warpgroup, q_smem, first, ids, after_first_tile, scratch))
        # Rows past a segment's end get weights of 0 in the fused backward kernel, which has no masks.
        if self.keeps_to_segments:
            lse = jnp.where(tiles.row_numbers() < self.own_count(item, queries, first), lse, jnp.inf)
        elif self.has_ids:
            lse = jnp.where(ids == PADDING, jnp.inf, lse)
        lse_ref.at[item.batch, item.head, pl.ds(first, ROWS)][...] = lse
        self.store_own(item, warpgroup, queries, [(scratch["q_smem"], out, out_ref, item.head)])

    def _over_keys(self, item, warpgroup, q_smem, first_query, ids, after_first_tile, scratch):
        def step_of(step, carry, keys, compares):
            own_ids = ids if compares else None
            return self._step(item, warpgroup, q_smem, first_query, own_ids, step, keys, carry, scratch)

        return self.over_tiles(item, self.keys, step_of, self.initial_carry(), after_first_tile, self.is_causal)

    def _step(self, item, warpgroup, q_smem, first_query, ids, step, keys, carry, scratch):
        """Fold the first `keys` keys of a tile into the running output, maximum and sum."""
        s, slot = self.schedule, self.slot(item, step)
        columns = self.columns_of(keys)
        first_key = (item.first + step) * s.tile
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])
        start = self.start_of_scores(item, step, warpgroup, columns, scratch)
        k_smem = tiles.first_rows(at(scratch["k_smem"], slot), columns)
        (scores,) = tiles.products((start, q_smem, k_smem), interpret=self.interpret)
        self.release_bias(item, step, scratch)
        keep = None
        if ids is not None:
            keep = tiles.same_id(ids, self.ids_of_keys(item, slot, first_key, columns, scratch))
        else:
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot])
        weights, out, highest, total = self.softmax_step(scores, first_query, first_key, keys, carry, keep)
        out = self.with_values(out, weights, slot, scratch)
        if ids is not None:
            # Only here: an arrival does not wait for outstanding reads, so the loader could overwrite ids that were
            # copied. The product just awaited depends on them.
            plgpu.barrier_arrive(scratch["k_consumed"].at[slot])
        return out, highest, total

    def with_values(self, out: tuple, weights, slot, scratch) -> tuple:
        """Return out with the product of a tile's weights and values added."""
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        v_smem = tiles.first_rows(at(scratch["v_smem"], slot), weights.shape[1])
        out = tiles.accumulated(out, [(i, weights, v) for i, v in enumerate(v_smem)], self.interpret)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot])
        return out

    def ids_of_keys(self, item, slot, first_key, columns: int, scratch):
        return plgpu.load(scratch["k_ids_smem"].at[slot, pl.ds(0, columns)], layout=BY_COLUMN)

    def columns_of(self, keys: int) -> int:
        """Return the columns of the scores of `keys` keys of a tile.

        72 of 128 columns took longer than all 128 (577 tokens: 0.300 ms instead of 0.296).
        """
        tile = self.schedule.tile
        return tiles.padded_columns(keys) if 2 * keys <= tile else tile

    # --- online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), a carry of output, maximum and sum -----------
    # The sum is (64, 8): one value per row and column of a group (groups.py). A thread has two of these columns. It
    # adds up its own weights, and threads exchange their sums only at the end.

    def initial_carry(self) -> tuple:
        return self.zeros(), filled((ROWS,), LOWEST, BY_ROW), filled((ROWS, groups.COLUMNS), 0, WGMMA)

    def softmax_step(self, scores, first_query, first_key, keys, carry, keep=None, count=None) -> tuple:
        """Return the rounded weights of `keys` keys from first_key on, and the rescaled output, maximum and sum.

        scores: in units of q k. keep: where a query attends to a key; None: everywhere. count: how many of the keys
            get weights; None: all.
        """
        out, *statistics = carry
        weights, shrink, *statistics = self.weigh(scores, first_query, first_key, keys, statistics, keep, count)
        return self.rounded(weights), self.rescaled(out, shrink), *statistics

    def weigh(self, scores, first_query, first_key, keys, statistics, keep=None, count=None, pinned=None) -> tuple:
        """Return softmax_step's weights before they are rounded, the outputs' factor, and the maximum and sum.

        pinned: of how many groups of columns the sums are pinned; see groups.pin. None: nothing is pinned.
        """
        highest, total = statistics
        scale = self.scale * LOG2E
        if scale <= 0:
            scores, scale = scores * scale, 1.0
        if self.is_causal or (keys < scores.shape[1] and not self.bias_shape):  # the bias of padding is -inf
            scores = self._masked(scores, first_query, first_key)
        if count is not None:
            scores = first_columns(scores, count, self.interpret)
        if keep is not None:
            scores = jnp.where(keep, scores, -jnp.inf)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * scale)
        shrink = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores * scale - along_rows(new_highest, scores.shape))
        summed = weights.shape[1] // groups.COLUMNS if pinned is None else pinned
        total = total * along_rows(shrink, total.shape) + groups.summed(weights, summed)
        if pinned is not None and not self.interpret:  # the interpreter does not run Mosaic GPU code
            groups.pin(total)
        return weights, shrink, new_highest, groups.added(total, weights, summed)

    def rounded(self, weights):
        """Return weights as an operand of the product with values."""
        return tiles.widened(weights.astype(self.dtype))

    def rescaled(self, out, shrink) -> tuple:
        return tuple(x * along_rows(shrink, x.shape) for x in out)

    def finalize(self, out, highest, total) -> tuple:
        """Return the output, and the log-sum-exp in log2 units."""
        total = total.sum(axis=1)
        if self.has_ids or self.bias_shape:  # a query without keys: out is 0, and every weight of the backward pass
            has_key = total > 0
            inverse = jnp.where(has_key, 1 / total, 0.0)
            # Of a row whose bias absorbs its scores, relative to LOW; see exponents.
            highest = jnp.where(highest <= tiles.LOW / 2, 0.0, highest) if self.bias_shape else highest
            lse = jnp.where(has_key, highest + jnp.log(total) * LOG2E, jnp.inf)
        else:
            inverse = 1 / total
            lse = highest + jnp.log(total) * LOG2E
        return tuple(x * along_rows(inverse, x.shape) for x in out), lse

    def _masked(self, scores, first_query, first_key):
        key = tiles.position(scores.shape, 1) + first_key
        keep = key < self.keys
        if self.is_causal:
            keep = keep & (key <= tiles.position(scores.shape, 0) + first_query)
        return jnp.where(keep, scores, -jnp.inf)
