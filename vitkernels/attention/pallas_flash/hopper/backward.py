"""The backward kernels of `pallas_flash` on Hopper: dq together with delta = rowsum(dO O), then dk and dv.

Both recompute the weights from the forward pass's log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691). Rows
beyond the last token load as zeros, and their results are never stored.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from dataclasses import dataclass
from functools import partial
from itertools import starmap

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import async_product, tiles
from vitkernels.attention.pallas_flash.hopper.gradient_products import (
    StreamedTile,
    add_key_gradients,
    add_query_gradient,
)
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows, RingKernel
from vitkernels.attention.pallas_flash.hopper.schedule import starts_with_two
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    BY_ROW,
    ROWS,
    along_columns,
    along_rows,
    at,
    row_sums,
)
from vitkernels.attention.pallas_flash.hopper.work_items import Side


@dataclass(frozen=True)
class Backward(RingKernel):
    """The two backward kernels, `dq` and then `dkdv`; each is built with its own schedule.

    yields: do no work if counts on the device show that the fused backward kernel is faster; the call launches both.
    """

    yields: bool = False

    def sides(self, ids: tuple) -> tuple[Side, Side]:
        """Return queries and keys, with the counts if they may leave all work to the fused kernel."""
        queries, keys = super().sides(ids)
        counts = ids[4] if self.yields else None
        return queries._replace(counts=counts), keys._replace(counts=counts)

    # --- dq -----------------------------------------------------------------------------------------------------------

    def dq(self, q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras):
        """Return dq in an array like q's, and delta = rowsum(dO O), (B, H, padded N) like lse. extras: see Forward."""
        scratch = {
            "q_smem": self.own_tiles(),
            "do_smem": self.own_tiles(),
            "out_smem": self.own_tiles(),
            "lse_smem": plgpu.SMEM((self.owners, ROWS), jnp.float32),
            "k_smem": self.ring_for_products(),
            "v_smem": self.ring_for_products(),
            "q_arrived": self.own_arrived(self.copies),
            "do_arrived": self.own_arrived(2 * self.copies + 1 + self.has_ids),
            "own_consumed": self.own_consumed(),
            "arrived": self.arrived(2 * self.tile_copies + self.has_ids),
            "consumed": self.consumed(),
        }
        scratch |= self.bias_scratch()
        if self.has_ids:
            scratch |= {"own_ids_smem": self.own_ids(), "ids_smem": self.ring_of_ids()}
        kernel = self.kernel(
            self._dq_body, self.queries, (self.rows(self.queries, self.all_heads), self.vector()), scratch
        )
        return kernel(q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras)

    def _dq_body(self, q_ref, k_ref, v_ref, out_ref, do_ref, lse_ref, *refs, **scratch):
        bias_ref, ids, (dq_ref, delta_ref) = self.extras(refs)
        scratch["bias_ref"] = bias_ref
        queries, keys = scratch["sides"] = self.sides(ids)

        def load_own(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            row = self.own_row(item, queries, first)
            q_arrived, do_arrived = (scratch[name].at[owner] for name in ("q_arrived", "do_arrived"))

            def load(ref, head, name, arrived):
                tiles.load_rows(ref, item.batch, row, head, scratch[name], owner, arrived, self.interpret)

            load(do_ref, item.head, "do_smem", do_arrived)
            load(out_ref, item.head, "out_smem", do_arrived)
            lse = lse_ref.at[item.batch, item.head, pl.ds(first, ROWS)]
            plgpu.copy_gmem_to_smem(lse, scratch["lse_smem"].at[owner], do_arrived)
            if ids:
                self._load_own_ids(queries.ids, item, first, owner, do_arrived, scratch)
            load(q_ref, self.heads_of(item)[0], "q_smem", q_arrived)

        def load_tile(item, tile, slot):
            _, k_head, v_head = self.heads_of(item)
            tile = self._reordered(tile, self.keys)
            first, arrived = tile * self.schedule.tile, scratch["arrived"].at[slot]
            for ref, head, name in ((k_ref, k_head, "k_smem"), (v_ref, v_head, "v_smem")):
                self.load_tile(ref, item, keys, tile, head, scratch[name], slot, arrived)
            if ids:
                self._load_ids(keys.ids, item, first, slot, arrived, scratch)

        self.divide_roles(
            queries,
            lambda item: self.with_span(item, queries, keys),
            OwnRows(load_own, (scratch["do_arrived"], scratch["q_arrived"]), scratch["own_consumed"]),
            [self.stream(load_tile, scratch["arrived"], scratch["consumed"]), *self.bias_streams(scratch)],
            lambda *where: self._dq_of(*where, dq_ref, delta_ref, scratch),
            scratch,
        )

    def _dq_of(self, item, warpgroup, after_first_tile, dq_ref, delta_ref, scratch):
        owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        q, do, out = (at(scratch[name], owner) for name in ("q_smem", "do_smem", "out_smem"))
        plgpu.barrier_wait(scratch["do_arrived"].at[owner])
        lse = plgpu.load(scratch["lse_smem"].at[owner], layout=BY_ROW)
        ids = self._own_ids_of(owner, scratch)
        delta = sum(row_sums(x, y) for x, y in zip(do, out, strict=True))
        delta_ref.at[item.batch, item.head, pl.ds(first, ROWS)][...] = delta
        plgpu.barrier_wait(scratch["q_arrived"].at[owner])
        q, do = self.operand(q), self.operand(do)

        def add(dq, taken, compares=False):
            tile = partial(self._keys_of, item, warpgroup, first, lse, delta, ids if compares else None, scratch)
            options = self.schedule.tile, self.dtype, self.interpret
            release_bias = lambda: self._release_biases(item, taken, scratch)  # noqa: E731
            dq = add_query_gradient(dq, (q, do), tuple(starmap(tile, taken)), release_bias, *options)
            self._release(item, taken, scratch)
            return dq

        dq = self._over(item, self.keys, add, async_product.zeros(self.head_dim), after_first_tile)
        queries, _ = scratch["sides"]
        q_head, *_ = self.heads_of(item)
        dq = tuple(x * self.scale for x in async_product.by_group(dq))
        self.store_own(item, warpgroup, queries, [(scratch["q_smem"], dq, dq_ref, q_head)])

    def _keys_of(self, item, warpgroup, first_query, lse, delta, ids, scratch, place, keys) -> StreamedTile:
        """Wait for the tile with this place among those of the item, and return it. keys: how many it has."""
        slot, columns = self.slot(item, place), tiles.padded_columns(keys)
        plgpu.barrier_wait(scratch["arrived"].at[slot])

        def weights_of(scores, first):
            weights = jnp.exp2(self.exponents(scores) - along_rows(lse, scores.shape))
            column = tiles.position(scores.shape, 1) + first
            if keys < columns and not self.bias_shape:  # the bias of padding is -inf
                weights = jnp.where(column < keys, weights, 0.0)
            if self.is_causal:
                key = column + (item.first + place) * self.schedule.tile
                weights = jnp.where(key <= tiles.position(scores.shape, 0) + first_query, weights, 0.0)
            return self._of_same_id(weights, ids, slot, first, scratch)

        return StreamedTile(
            (self.start_of_scores(item, place, warpgroup, columns, scratch), along_rows(-delta, (ROWS, columns))),
            (at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)),
            weights_of,
        )

    # --- the order of tiles -------------------------------------------------------------------------------------------

    def _starts_with_two(self, tokens: int) -> bool:
        is_plain = not self.has_ids and not self.is_causal and self.bias_shape is None
        return is_plain and starts_with_two(tokens, self.head_dim, self.schedule)

    def _reordered(self, tile, tokens: int):
        """Return which tile streams past in this one's place; see starts_with_two."""
        if not self._starts_with_two(tokens):
            return tile
        return jnp.where(tile == 0, tokens // self.schedule.tile, tile - 1)

    def _over(self, item, tokens: int, add, sums, after_first_tile):
        """Return sums with all streamed tiles added by add(sums, taken, compares).

        taken: of each tile that is added at once, its place among the item's tiles, and its number of tokens.
        """
        tile = self.schedule.tile
        if not self._starts_with_two(tokens):
            step_of = lambda place, sums, count, compares: add(sums, ((place, count),), compares)  # noqa: E731
            return self.over_tiles(item, tokens, step_of, sums, after_first_tile)
        full, rest = divmod(tokens, tile)
        sums = add(sums, ((0, rest), (1, tile)))
        after_first_tile()
        # A loop whose end the compiler does not know; see over_tiles.
        return lax.fori_loop(2, self.opaque(full + 1), lambda place, sums: add(sums, ((place, tile),)), sums)

    def _release(self, item, taken, scratch) -> None:
        """Release the slots of tiles that have been added."""
        for place, _ in taken:
            plgpu.barrier_arrive(scratch["consumed"].at[self.slot(item, place)])

    def _release_biases(self, item, taken, scratch) -> None:
        for place, _ in taken:
            self.release_bias(item, place, scratch)

    # --- ids of own and of streamed rows ------------------------------------------------------------------------------

    def _load_own_ids(self, ids_ref, item, first, owner, arrived, scratch) -> None:
        rows = ids_ref.at[item.batch, pl.ds(first, ROWS)]
        plgpu.copy_gmem_to_smem(rows, scratch["own_ids_smem"].at[owner], arrived)

    def _load_ids(self, ids_ref, item, first, slot, arrived, scratch) -> None:
        smem = scratch["ids_smem"].at[slot]
        plgpu.copy_gmem_to_smem(ids_ref.at[item.batch, pl.ds(first, smem.shape[0])], smem, arrived)

    def _own_ids_of(self, owner, scratch):
        return plgpu.load(scratch["own_ids_smem"].at[owner], layout=BY_ROW) if self.has_ids else None

    def _of_same_id(self, weights, own_ids, slot, first, scratch):
        """Return the weights, (own, streamed rows from `first` on), with zeros where the ids differ."""
        if own_ids is None:
            return weights
        of_columns = plgpu.load(scratch["ids_smem"].at[slot, pl.ds(first, weights.shape[1])], layout=BY_COLUMN)
        return jnp.where(tiles.same_id(own_ids, of_columns), weights, 0.0)

    # --- dk, dv -------------------------------------------------------------------------------------------------------

    def dkdv(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, *extras):
        """Return dk and dv in arrays like k's and v's.

        extras: see Forward; the bias is transposed.
        """
        vectors = plgpu.SMEM((self.schedule.stages, self.schedule.tile), jnp.float32)
        scratch = {
            "k_smem": self.own_tiles(),
            "v_smem": self.own_tiles(),
            "q_smem": self.ring_for_products(),
            "do_smem": self.ring_for_products(),
            "lse_smem": vectors,
            "delta_smem": vectors,
            "own_arrived": self.own_arrived(2 * self.copies + self.has_ids),
            "own_consumed": self.own_consumed(),
            "arrived": self.arrived(2 * self.tile_copies + 2 + self.has_ids),
            "consumed": self.consumed(),
        }
        scratch |= self.bias_scratch()
        if self.has_ids:
            scratch |= {"own_ids_smem": self.own_ids(), "ids_smem": self.ring_of_ids()}
        keys = self.rows(self.keys, self.all_heads)
        kernel = self.kernel(self._dkdv_body, self.keys, (keys, keys), scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, *extras)

    def _dkdv_body(self, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *refs, **scratch):
        bias_ref, ids, (dk_ref, dv_ref) = self.extras(refs)
        scratch["bias_ref"] = bias_ref
        queries, keys = scratch["sides"] = self.sides(ids)

        def load_own(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            row = self.own_row(item, keys, first)
            arrived = scratch["own_arrived"].at[owner]
            _, k_head, v_head = self.heads_of(item)
            for ref, head, name in ((k_ref, k_head, "k_smem"), (v_ref, v_head, "v_smem")):
                tiles.load_rows(ref, item.batch, row, head, scratch[name], owner, arrived, self.interpret)
            if ids:
                self._load_own_ids(keys.ids, item, first, owner, arrived, scratch)

        def load_tile(item, tile, slot):
            q_head, *_ = self.heads_of(item)
            tile = self._reordered(tile, self.queries)
            first, arrived = tile * self.schedule.tile, scratch["arrived"].at[slot]
            for ref, head, name in ((q_ref, q_head, "q_smem"), (do_ref, item.head, "do_smem")):
                self.load_tile(ref, item, queries, tile, head, scratch[name], slot, arrived)
            for ref, name in ((lse_ref, "lse_smem"), (delta_ref, "delta_smem")):
                rows = ref.at[item.batch, item.head, pl.ds(first, self.schedule.tile)]
                plgpu.copy_gmem_to_smem(rows, scratch[name].at[slot], arrived)
            if ids:
                self._load_ids(queries.ids, item, first, slot, arrived, scratch)

        self.divide_roles(
            keys,
            lambda item: self.with_span(item, keys, queries),
            OwnRows(load_own, (scratch["own_arrived"],), scratch["own_consumed"]),
            [self.stream(load_tile, scratch["arrived"], scratch["consumed"]), *self.bias_streams(scratch)],
            lambda *where: self._dkdv_of(*where, dk_ref, dv_ref, scratch),
            scratch,
        )

    def _dkdv_of(self, item, warpgroup, after_first_tile, dk_ref, dv_ref, scratch):
        owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        k, v = at(scratch["k_smem"], owner), at(scratch["v_smem"], owner)
        plgpu.barrier_wait(scratch["own_arrived"].at[owner])
        ids = self._own_ids_of(owner, scratch)
        k = self.operand(k)

        def add(sums, taken, compares=False):
            tile = partial(self._queries_of, item, warpgroup, first, ids if compares else None, scratch)
            options = self.schedule.tile, self.dtype, self.interpret
            release_bias = lambda: self._release_biases(item, taken, scratch)  # noqa: E731
            sums = add_key_gradients(sums, (k, v), tuple(starmap(tile, taken)), release_bias, *options)
            # These products depend on all that was read from the slots to registers, so the reads are over.
            self._release(item, taken, scratch)
            return sums

        zeros = async_product.zeros(self.head_dim)
        dk, dv = self._over(item, self.queries, add, (zeros, zeros), after_first_tile)
        _, keys = scratch["sides"]
        _, k_head, v_head = self.heads_of(item)
        dk, dv = tuple(x * self.scale for x in async_product.by_group(dk)), async_product.by_group(dv)
        results = [(scratch["k_smem"], dk, dk_ref, k_head), (scratch["v_smem"], dv, dv_ref, v_head)]
        self.store_own(item, warpgroup, keys, results)

    @property
    def _starts_from_lse(self) -> bool:
        """Return whether products of scores start from -lse in units of q k. With a bias, they start from that."""
        return self.bias_shape is None and self.can_start_from_lse

    def _queries_of(self, item, warpgroup, first_key, ids, scratch, place, queries) -> StreamedTile:
        """Wait for the tile with this place among those of the item, and return it. queries: how many it has."""
        slot, columns = self.slot(item, place), tiles.padded_columns(queries)
        first_query = (item.first + place) * self.schedule.tile
        plgpu.barrier_wait(scratch["arrived"].at[slot])

        def of_queries(name, first=0, count=columns):
            vector = plgpu.load(scratch[name].at[slot, pl.ds(first, count)], layout=BY_COLUMN)
            return along_columns(vector, (ROWS, count))

        # The products start from -lse and -delta. Loaded later, they would take as many registers as an operand.
        start = self.start_of_scores(item, place, warpgroup, columns, scratch)
        if self._starts_from_lse:
            start = of_queries("lse_smem") * (-1 / self.log2_scale)

        def weights_of(scores, first):
            exponents = self.exponents(scores)
            if not self._starts_from_lse:
                exponents -= of_queries("lse_smem", first, scores.shape[1])
            weights = jnp.exp2(exponents)
            if self.is_causal:
                query = tiles.position(scores.shape, 1) + first_query + first
                weights = jnp.where(tiles.position(scores.shape, 0) + first_key <= query, weights, 0.0)
            return self._of_same_id(weights, ids, slot, first, scratch)

        def ds_of(weights, dp_less_delta, first):
            # Nothing was stored as delta of the rows behind a segment, so a product with zero would not do.
            return self._of_same_id(weights * dp_less_delta, ids, slot, first, scratch)

        starts = start, -of_queries("delta_smem")
        return StreamedTile(starts, (at(scratch["q_smem"], slot), at(scratch["do_smem"], slot)), weights_of, ds_of)
