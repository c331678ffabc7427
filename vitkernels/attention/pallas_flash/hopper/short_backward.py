"""One backward kernel for dq, dk and dv of `pallas_flash` on Hopper, for at most 256 queries and 256 keys, or quads.

A persistent thread block loops over heads. Shared memory holds all of a head's inputs, so scores and weights are
computed once and each array crosses the memory bus once. Compute warpgroups own the keys: they keep dk and dv in
registers and loop over the queries, 64 at a time. They pass dS to one more warpgroup, the helper, which multiplies it
with all keys to get dq, computes rowsum(dO O) beforehand, and loads the next head as buffers become free. No sum uses
atomics, so results are bit-equal from run to run.

Two compute warpgroups own up to 128 keys each. Of 129 to 208 keys, in calls of more than 128 queries without a bias or
ids, three own 64 each, and the helper processes the rest.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import QUAD_COUNT, QUAD_END, QUAD_FIRST
from vitkernels.attention.pallas_flash.hopper.last_keys import MOST as MOST_LAST_KEYS
from vitkernels.attention.pallas_flash.hopper.last_keys import LastKeys
from vitkernels.attention.pallas_flash.hopper.per_head import NARROW, PerHeadKernel
from vitkernels.attention.pallas_flash.hopper.schedule import fits_bias
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    BY_ROW,
    ROWS,
    WGMMA,
    along_columns,
    along_rows,
    at,
    filled,
    row_sums,
    transposed,
)

# Per thread of a compute warpgroup and of the helper, by the number of compute warpgroups. 2 * 208 + 88 = 3 * 168, and
# 3 * 144 + 80 = 4 * 128.
REGISTERS = {2: (208, 88), 3: (144, 80)}
BUFFERS = 2  # for tiles of dS, and at most for those of O


@dataclass(frozen=True)
class ShortBackward(PerHeadKernel):
    """The backward kernel for non-causal calls. Tiles have 64 rows; rows beyond the last token load as zeros."""

    stores_ds: bool = False  # the kernel also returns dS, transposed

    @property
    def copies_bias(self) -> bool:
        """Return whether each tile of a bias is copied to shared memory ahead; otherwise, it is loaded to registers."""
        return self.bias_shape is not None and fits_bias(self._tiles + 1, 2, self.bias_bytes)

    @property
    def out_buffers(self) -> int:
        """Return how many tiles of O are held at a time."""
        return BUFFERS if not self.copies_bias or fits_bias(self._tiles + BUFFERS, 2, self.bias_bytes) else 1

    @property
    def _tiles(self) -> int:
        """Return how many tiles a call with a bias holds besides those of O: of q and dO, k and v, dS, and dq."""
        return 2 * self.steps + self.key_tiles * (2 + BUFFERS) + 1

    @property
    def requests_early(self) -> bool:
        """Return whether a step gets its first bias in registers from the step before.

        With a bias per image but not per head, ptxas then spills accumulators, and serializes the products (C7512).
        """
        return self.bias_shape is not None and self.bias_shape[1] > 1 and not self.copies_bias

    @property
    def steps(self) -> int:
        """Return the number of query tiles."""
        return pl.cdiv(self.queries_at_once, ROWS)

    @property
    def warpgroups(self) -> int:
        """Return the number of compute warpgroups.

        At 145 to 192 tokens, three take 0.78 of the time of two, at 197 0.90, and at 201 0.97 (H200). With a bias or
        ids, some lengths would exceed their registers. Fewer queries were not tried.
        """
        is_plain = self.bias_shape is None and not self.has_ids
        takes_three = is_plain and self.queries > 2 * ROWS and 2 * ROWS < self.keys <= 3 * ROWS + MOST_LAST_KEYS
        return 3 if takes_three else 2

    @property
    def own(self) -> int:
        """Return the number of key tiles per compute warpgroup."""
        return 1 if self.warpgroups == 3 else pl.cdiv(self.keys_at_once, 2 * ROWS)

    @property
    def last_keys(self) -> LastKeys | None:
        """Return the keys that the helper processes, if there are any."""
        count = self.keys_at_once - self.key_tiles * ROWS
        if count <= 0:
            return None
        return LastKeys(count, self.key_tiles, self.head_dim, self.dtype, self.log2_scale, self.interpret)

    @property
    def key_tiles(self) -> int:
        """Return the number of key tiles of the compute warpgroups."""
        return self.warpgroups * self.own

    @property
    def ds(self) -> jax.ShapeDtypeStruct:
        """Return the array of dS, (B, H, M, N rounded up to 8), as the TMA unit requires rows of 16 n bytes."""
        shape = self.batch, self.heads, self.keys, tiles.padded_columns(self.queries)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras):
        """Return dq, dk and dv in arrays like q's, k's and v's, and with stores_ds dS.

        extras: see Forward; the bias is transposed. The chunks of ids lie at multiples of 64, or form quads. Then the
            kernel writes only their rows.
        """
        queries, keys, dtype = self.steps, self.key_tiles, jnp.dtype(self.dtype)
        loaded = keys + (self.last_keys is not None)

        def head_tiles(count):
            return tiles.tile(ROWS, self.head_dim, dtype, count)

        scratch = {
            "q_smem": head_tiles(queries),
            "do_smem": head_tiles(queries),
            "out_smem": head_tiles(self.out_buffers),
            "k_smem": head_tiles(loaded),
            "v_smem": head_tiles(keys),
            "ds_smem": tiles.tile(ROWS, ROWS, dtype, BUFFERS * keys),  # transposed; dv and dk are stored through it
            "dq_smem": head_tiles(1),
            "lse_smem": plgpu.SMEM((queries, ROWS), jnp.float32),
            "delta_smem": plgpu.SMEM((queries, ROWS), jnp.float32),
            # With q, dO, log-sum-exp and the ids of queries arrive.
            "q_arrived": plgpu.Barrier(num_arrivals=2 * self.copies + 1 + self.compares_ids, num_barriers=queries),
            "out_arrived": plgpu.Barrier(num_arrivals=self.copies, num_barriers=queries),
            "keys_arrived": plgpu.Barrier(num_arrivals=2 * self.copies * loaded + self.compares_ids),
            "delta_ready": plgpu.Barrier(num_arrivals=1, num_barriers=queries),
            "ds_ready": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=BUFFERS),
            "ds_consumed": plgpu.Barrier(num_arrivals=1, num_barriers=BUFFERS),
            "q_consumed": plgpu.Barrier(num_arrivals=self.warpgroups, num_barriers=queries),
            "v_consumed": plgpu.Barrier(num_arrivals=self.warpgroups),
        }
        scratch |= self.quad_scratch()
        if self.last_keys:
            scratch |= self.last_keys.scratch()
        if self.copies_bias:
            scratch |= self.bias_scratch(2)
        if self.compares_ids:
            scratch["q_ids_smem"] = plgpu.SMEM((queries, ROWS), jnp.int32)
            scratch["k_ids_smem"] = plgpu.SMEM((keys * ROWS,), jnp.int32)
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        outputs = (q, k, k, self.ds) if self.stores_ds else (q, k, k)
        kernel = self.launch(self._body, {"block": self.blocks}, self.warpgroups + 1, outputs, scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras)

    def _body(self, q, k, v, out, do, lse, *rest, **scratch):
        bias, ids, (dq, dk, dv, *ds) = self.extras(rest)
        refs = {"q": q, "k": k, "v": v, "out": out, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "bias": bias}
        refs |= {"ds": ds[0] if ds else None, "ids": ids}
        warpgroup = lax.axis_index("warpgroup")
        iterations = self.iterations(ids)
        if self.bias_shape or self.has_ids:  # a number of 1, known to the compiler, removes the loop, and it spills
            iterations = self.opaque(iterations)

        @pl.when(warpgroup < self.warpgroups)
        def _():
            plgpu.set_max_registers(REGISTERS[self.warpgroups][0], action="increase")
            self._request_bias(jnp.int32(0), jnp.int32(0), 0, refs, scratch)
            compute = lambda iteration, _: self._compute(iteration, iterations, refs, scratch)  # noqa: E731
            lax.fori_loop(0, iterations, compute, None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.warpgroups)
        def _():
            plgpu.set_max_registers(REGISTERS[self.warpgroups][1], action="decrease")
            if self.last_keys:
                self.last_keys.clear(scratch)
            self.request_place(jnp.int32(0), iterations, ids, scratch)
            if self.has_quads:  # there may be none
                pl.when(iterations > 0)(lambda: self._start_helper(refs, scratch))
            else:
                self._start_helper(refs, scratch)
            lax.fori_loop(
                0, iterations, lambda iteration, _: self._run_helper(iteration, iterations, refs, scratch), None
            )
            plgpu.wait_smem_to_gmem(0)

    # --- loads and stores ---------------------------------------------------------------------------------------------

    def _load(self, place, name, tile, buffer, barrier, refs, scratch):
        head = place.head + (self.first_heads["qkv".index(name)] if name in "qkv" else 0)
        row = self.row_of(place, tile)
        tiles.load_rows(refs[name], place.batch, row, head, scratch[f"{name}_smem"], buffer, barrier, self.interpret)

    def _load_keys(self, place, name, refs, scratch):
        arrived, last = scratch["keys_arrived"], self.last_keys
        for tile in range(self.key_tiles):
            self._load(place, name, tile, tile, arrived, refs, scratch)
        if last and name == "k":
            self._load(place, name, last.tile, last.tile, arrived, refs, scratch)
        elif last:
            head, smem = place.head + self.first_heads[2], scratch["last_v_smem"]
            tiles.load_rows(refs[name], place.batch, last.first_row, head, smem, 0, arrived, self.interpret)
        if self.compares_ids and name == "k":
            source = refs["ids"][1].at[place.batch, pl.ds(0, self.key_tiles * ROWS)]
            plgpu.copy_gmem_to_smem(source, scratch["k_ids_smem"], scratch["keys_arrived"])

    def _load_queries(self, place, tile, refs, scratch):
        arrived = scratch["q_arrived"].at[tile]
        for name in ("q", "do"):
            self._load(place, name, tile, tile, arrived, refs, scratch)
        rows = pl.ds((place.chunk + tile) * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(refs["lse"].at[place.batch, place.head, rows], scratch["lse_smem"].at[tile], arrived)
        if self.compares_ids:
            plgpu.copy_gmem_to_smem(refs["ids"][0].at[place.batch, rows], scratch["q_ids_smem"].at[tile], arrived)

    def _load_out(self, place, tile, refs, scratch):
        self._load(place, "out", tile, lax.rem(tile, self.out_buffers), scratch["out_arrived"].at[tile], refs, scratch)

    def _load_first_out(self, place, refs, scratch):
        for tile in range(min(self.out_buffers, self.steps)):
            self._load_out(place, jnp.int32(tile), refs, scratch)

    def _start_helper(self, refs, scratch):
        """Request the first head; with last keys, also compute its deltas, but for the last tile's."""
        self.wait_for_place(jnp.int32(0), scratch)
        place = self.place_of(jnp.int32(0), refs["ids"], scratch)
        self._load_keys(place, "k", refs, scratch)
        self._load_keys(place, "v", refs, scratch)
        for tile in range(self.steps):
            self._load_queries(place, tile, refs, scratch)
        self._load_first_out(place, refs, scratch)
        if self.last_keys:
            lax.fori_loop(0, self.steps - 1, lambda tile, _: self._delta(place, tile, refs, scratch), None)

    def _store(self, place, name, values, scale, first_tile, smem, buffer, refs):
        """Start storing `values` consecutively, through smem's tiles from `buffer` on."""
        head = self._gradient_head(place, name)
        scaled = [tuple(x * scale for x in value) for value in values]
        self.store_tiles(smem, buffer, scaled, refs[name], place, head, first_tile)

    def _gradient_head(self, place, name: str):
        return place.head + self.first_heads[("dq", "dk", "dv").index(name)]

    # --- the helper: delta = rowsum(dO O), dq, the last keys, and all loads -------------------------------------------

    def _run_helper(self, iteration, iterations, refs, scratch):
        """Process a head.

        With last keys, the helper is the limit. The deltas of a head, but for the last tile's, are then computed while
        the previous head is processed, as soon as the rows are there; its first dq would wait for them.
        """
        place, more = self.place_of(iteration, refs["ids"], scratch), iteration + 1 < iterations
        following = lambda: self.place_of(iteration + 1, refs["ids"], scratch)  # noqa: E731
        self.request_place(iteration + 1, iterations, refs["ids"], scratch)
        last_keys, last_tile = self.last_keys, self.steps - 1
        delta = lambda tile, _=None: self._delta(place, tile, refs, scratch)  # noqa: E731
        if not last_keys:
            lax.fori_loop(0, self.steps, delta, None)
        plgpu.barrier_wait(scratch["keys_arrived"])
        if self.has_quads:
            pl.when(more)(lambda: self.wait_for_place(iteration + 1, scratch))

        def dq_of(position, sums):
            tile, buffer = self._tile_at(position), lax.rem(position, BUFFERS)
            last = position == last_tile
            previous = lambda: self._next_queries(following, self._tile_at(position - 1), more, refs, scratch)  # noqa: E731
            if last_keys:
                pl.when(position > 0)(previous)  # early, so that the rows arrive before their delta is computed
                last_keys.put_weights(tile, scratch, self.opaque(0))
            plgpu.barrier_wait(scratch["ds_ready"].at[buffer])

            @pl.when(last)
            def _():
                plgpu.barrier_wait(scratch["v_consumed"])
                pl.when(more)(lambda: self._load_keys(following(), "v", refs, scratch))

            if self.stores_ds:
                self._store_ds(place, tile, buffer, refs, scratch)
            dq, sums = self._dq(buffer, tile, sums, scratch)
            if self.stores_ds:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch["ds_consumed"].at[buffer])

            @pl.when(last & more)
            def _():
                self._load_keys(following(), "k", refs, scratch)
                if not last_keys:
                    self._load_first_out(following(), refs, scratch)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._store(place, "dq", [dq], self.scale, tile, scratch["dq_smem"], 0, refs)
            if not last_keys:
                pl.when(position > 0)(previous)
                return sums

            pl.when(position == 0)(lambda: delta(jnp.int32(last_tile)))
            pl.when((position == 0) & more)(lambda: self._load_first_out(following(), refs, scratch))
            of_next_head = lambda: self._delta(following(), position - 1, refs, scratch)  # noqa: E731
            pl.when((position > 0) & more)(of_next_head)
            return sums

        sums = lax.fori_loop(0, self.steps, dq_of, last_keys.zeros() if last_keys else ())
        if last_keys:
            self._store_last_keys(last_keys, place, sums, refs, scratch)
        self._next_queries(following, self.steps - 1, more, refs, scratch)

    def _store_ds(self, place, tile, buffer, refs, scratch):
        """Start storing dS of a tile of queries; the compute warpgroups have committed it to the TMA unit's proxy."""
        where = place.batch, place.head
        columns = pl.ds(tiles.unchecked(tile * ROWS), ROWS)
        for key_tile in range(pl.cdiv(self.keys, ROWS)):
            rows = pl.ds(tiles.unchecked(key_tile * ROWS), ROWS)
            smem = tiles.untiled(scratch["ds_smem"][0], buffer * self.key_tiles + key_tile, self.interpret)
            plgpu.copy_smem_to_gmem(smem, refs["ds"].at[(*where, rows, columns)])

    def _next_queries(self, following, tile, more, refs, scratch):
        plgpu.barrier_wait(scratch["q_consumed"].at[tile])
        pl.when(more)(lambda: self._load_queries(following(), tile, refs, scratch))

    def _delta(self, place, tile, refs, scratch):
        plgpu.barrier_wait(scratch["q_arrived"].at[tile])
        plgpu.barrier_wait(scratch["out_arrived"].at[tile])
        pairs = zip(at(scratch["do_smem"], tile), at(scratch["out_smem"], lax.rem(tile, self.out_buffers)), strict=True)
        scratch["delta_smem"].at[tile][...] = sum(row_sums(x, y) for x, y in pairs)
        plgpu.barrier_arrive(scratch["delta_ready"].at[tile])
        plgpu.commit_smem()  # all four warps have read O
        following = tile + self.out_buffers
        pl.when(following < self.steps)(lambda: self._load_out(place, following, refs, scratch))

    def _store_last_keys(self, last_keys: LastKeys, place, sums, refs, scratch) -> None:
        """Start storing dv and dk of the last keys."""
        last_keys.put_gradients(sums, self.scale, scratch, self.opaque(0))
        for i, name in enumerate(("dv", "dk")):
            head, smem, row = self._gradient_head(place, name), scratch["last_gradients_smem"], last_keys.first_row
            tiles.store_rows(smem, i, refs[name], place.batch, row, head, self.interpret)

    def _dq(self, buffer, tile, sums, scratch) -> tuple:
        """Return dq of a tile of queries, and the last keys' sums, if there are any, with what the tile adds."""
        zero = self.opaque(0)
        k = [at(scratch["k_smem"], zero + i) for i in range(self.key_tiles)]
        ds = [at(scratch["ds_smem"], buffer * self.key_tiles + i)[0] for i in range(self.key_tiles)]
        products = [(j, transposed(x), part) for x, parts in zip(ds, k, strict=True) for j, part in enumerate(parts)]
        if self.last_keys:
            products += self.last_keys.products(tile, scratch, zero)
        dq, *sums = tiles.accumulated((*self.zeros(), *sums), products, self.interpret)
        return (dq,), tuple(sums)

    # --- the compute warpgroups: dS, dk, dv ---------------------------------------------------------------------------

    def _compute(self, iteration, iterations, refs, scratch):
        zeros = tuple(self.zeros() for _ in range(self.own))
        self.wait_for_place(iteration, scratch)
        plgpu.barrier_wait(scratch["keys_arrived"])
        full, last = divmod(self.queries_at_once, ROWS)
        # With three warpgroups, ptxas serializes the products of a narrow last tile of 48 or 56 columns (C7512).
        if tiles.padded_columns(last) > (40 if self.warpgroups == 3 else 56):
            full, last = full + 1, 0
        bias = None
        if self.requests_early:  # before the product that ends the previous step, which hides the latency
            bias = groups.load(self._bias_of(iteration, jnp.int32(0), 0, ROWS, refs), self.interpret)
        carry = zeros, zeros, bias

        def step(position, columns, *carry):
            return self._step(iteration, iterations, position, columns, *carry, refs, scratch)

        def step_of_quad(position, carry):
            place, tile = self.place_of(iteration, refs["ids"], scratch), self._tile_at(position)
            is_wide = place.of_chunk(tile, QUAD_COUNT) > NARROW
            ways = (
                lambda c: self._skip(position, c, scratch),
                lambda c: step(position, NARROW, *c),
                lambda c: step(position, ROWS, *c),
            )
            return lax.switch(jnp.where(self._needs(place, tile), 1 + is_wide.astype(jnp.int32), 0), ways, carry)

        # Hide the loop's end from the compiler, and keep the last tile's code behind it; otherwise registers spill.
        full_step = step_of_quad if self.has_quads else lambda position, c: step(position, ROWS, *c)
        carry = lax.fori_loop(0, self.opaque(full), full_step, carry)
        if last:
            position, carry = self._sequenced((jnp.int32(full), carry))
            carry = step(position, tiles.padded_columns(last), *carry)
        dk, dv, _ = carry
        first = lax.axis_index("warpgroup") * self.own
        for tile in range(max(0, self.steps - BUFFERS), self.steps):
            plgpu.barrier_wait(scratch["ds_consumed"].at[tile % BUFFERS])
        place = self.place_of(iteration, refs["ids"], scratch)
        self._store(place, "dv", dv, 1, first, scratch["ds_smem"], first, refs)
        self._store(place, "dk", dk, self.scale, first, scratch["ds_smem"], self.key_tiles + first, refs)

    def _tile_at(self, position):
        """Return which tile of queries the warpgroups process at a position.

        In quads, those that only one warpgroup needs alternate: 0, 2, 1, 3.
        """
        if not self.has_quads:
            return position
        return position + (position == 1).astype(jnp.int32) - (position == 2).astype(jnp.int32)

    def _needs(self, place, tile):
        """Return whether queries of a tile attend to keys of an own tile, those of a quad."""
        return functools.reduce(lambda a, b: a | b, (self._is_needed(place, tile, i) for i in range(self.own)))

    def _is_needed(self, place, tile, own_tile: int):
        """Return whether an own tile, of a quad, is of the same segment as a tile of queries."""
        chunk = lax.axis_index("warpgroup") * self.own + own_tile
        tile = tile + place.of_chunk(0, QUAD_FIRST)
        return (place.of_chunk(chunk, QUAD_FIRST) <= tile) & (tile < place.of_chunk(chunk, QUAD_END))

    def _skip(self, position, carry, scratch):
        """Pass zeros on to the helper instead of a tile's dS."""
        tile, buffer = self._tile_at(position), lax.rem(position, BUFFERS)
        first = lax.axis_index("warpgroup") * self.own
        plgpu.barrier_wait(scratch["q_arrived"].at[tile])
        self._wait_for_buffer(tile, position, buffer, scratch)
        for i in range(self.own):
            ds = at(scratch["ds_smem"], buffer * self.key_tiles + first + i)[0]
            ds[...] = filled((ROWS, ROWS), 0, WGMMA, ds.dtype)
        pl.when(position == self.steps - 1)(lambda: plgpu.barrier_arrive(scratch["v_consumed"]))
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["ds_ready"].at[buffer])
        plgpu.barrier_arrive(scratch["q_consumed"].at[tile])
        return carry

    def _step(self, iteration, iterations, position, columns, dk, dv, bias, refs, scratch):
        """Process the first `columns` queries of a tile. Scores and arrays of their size are keys by queries.

        bias: that of the first own tile, in registers; None: it is not there yet. Return also that of the next tile of
            queries.
        """
        request_after = lambda i: self._request_bias_after(iteration, iterations, position, i, refs, scratch)  # noqa: E731
        dk, dv = list(dk), list(dv)
        first = self.opaque(lax.axis_index("warpgroup")) * self.own
        tile, buffer = self._tile_at(position), lax.rem(position, BUFFERS)
        if bias is None:
            bias = self._start_of(iteration, tile, 0, columns, refs, scratch)
        plgpu.barrier_wait(scratch["q_arrived"].at[tile])
        q, do = at(scratch["q_smem"], tile), at(scratch["do_smem"], tile)
        some_q, some_do = tiles.first_rows(q, columns), tiles.first_rows(do, columns)
        none = filled((ROWS, columns), 0, WGMMA)
        (scores,) = tiles.accumulated((bias[:, :columns],), self._scores(0, first, some_q, scratch), self.interpret)
        request_after(0)
        for i in range(self.own):
            last = i == self.own - 1
            weights = self._weights(scores, tile, first + i, self._has_padding(i), scratch)
            v = at(scratch["v_smem"], first + i)
            products = [(0, x, transposed(y)) for x, y in zip(v, some_do, strict=True)]
            products += [(1 + j, tiles.widened(weights), part) for j, part in enumerate(do)]
            dp, *dv_i = tiles.accumulated((none, *dv[i]), products, self.interpret)
            dv[i] = tuple(dv_i)
            if i == 0:
                self._wait_for_buffer(tile, position, buffer, scratch)
            if last:
                pl.when(position == self.steps - 1)(lambda: plgpu.barrier_arrive(scratch["v_consumed"]))
            ds = tiles.widened(self._ds(weights, dp, tile, scratch))
            at(scratch["ds_smem"], buffer * self.key_tiles + first + i)[0][...] = ds
            products = [(j, ds, part) for j, part in enumerate(q)]
            if last:
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch["ds_ready"].at[buffer])
                if self.requests_early and columns == ROWS:
                    of_next = self._bias_of(iteration, lax.min(tile + 1, self.steps - 1), 0, ROWS, refs)
                    bias = groups.load(of_next, self.interpret)
                else:
                    bias = None
                dk[i] = tiles.accumulated(dk[i], products, self.interpret)
            else:
                bias = self._start_of(iteration, tile, i + 1, columns, refs, scratch)
                products += self._scores(len(q), first + i + 1, some_q, scratch)
                *dk_i, scores = tiles.accumulated((*dk[i], bias), products, self.interpret)
                request_after(i + 1)
                dk[i] = tuple(dk_i)
        plgpu.barrier_arrive(scratch["q_consumed"].at[tile])
        return tuple(dk), tuple(dv), bias

    def _start_of(self, iteration, tile, own_tile, columns, refs, scratch):
        """Return what the scores of an own tile and the first `columns` queries of a tile start from.

        It is the bias, which was copied to shared memory or is loaded. In quads, it is infinitely low for keys past a
        segment's end, and for all if the queries are of another segment. Queries past a segment's end have a
        log-sum-exp of infinity.
        """
        if self.copies_bias:
            return self.copied_bias(lax.axis_index("warpgroup"), columns, scratch)
        if self.bias_shape is not None:
            return groups.load(self._bias_of(iteration, tile, own_tile, columns, refs), self.interpret)
        if not self.has_quads:
            return filled((ROWS, columns), 0, WGMMA)
        place = self.place_of(iteration, refs["ids"], scratch)
        keys = place.of_chunk(lax.axis_index("warpgroup") * self.own + own_tile, QUAD_COUNT)
        keys = jnp.where(self._is_needed(place, tile, own_tile), keys, 0)
        return along_rows(jnp.where(tiles.row_numbers() < keys, 0.0, self.lowest_product), (ROWS, columns))

    def _bias_of(self, iteration, tile, own_tile, columns, refs):
        """Return the bias, in device memory, of an own tile and the first `columns` queries of a tile."""
        first = self.opaque(lax.axis_index("warpgroup")) * self.own
        place = self.place_of(self.opaque(iteration), refs["ids"], {})
        where = self.opaque(place.batch), self.opaque(place.head), (first + own_tile) * ROWS, tile * ROWS
        return self.bias_at(refs["bias"], *where, columns)

    def _request_bias(self, iteration, tile, own_tile: int, refs, scratch) -> None:
        """Start copying the bias of an own tile and a tile of queries to shared memory, if it belongs there."""
        if self.copies_bias:
            warpgroup = lax.axis_index("warpgroup")
            self.copy_bias(self._bias_of(iteration, tile, own_tile, ROWS, refs), warpgroup, scratch)

    def _request_bias_after(self, iteration, iterations, tile, own_tile: int, refs, scratch) -> None:
        """Request the bias that is needed after that of an own tile, which is in registers, if there is more."""
        if not self.copies_bias:
            return
        if own_tile + 1 < self.own:
            self._request_bias(iteration, tile, own_tile + 1, refs, scratch)
            return
        is_last = tile == self.steps - 1
        iteration = iteration + jnp.int32(is_last)
        tile = jnp.where(is_last, 0, tile + 1)
        pl.when(iteration < iterations)(lambda: self._request_bias(iteration, tile, 0, refs, scratch))

    def _scores(self, index, k_tile, q, scratch) -> list:
        return [(index, x, transposed(y)) for x, y in zip(at(scratch["k_smem"], k_tile), q, strict=True)]

    def _has_padding(self, own_tile: int) -> bool:
        """Return whether any compute warpgroup's tile with this number has rows beyond the last key."""
        ends = ((warpgroup * self.own + own_tile + 1) * ROWS for warpgroup in range(self.warpgroups))
        return any(end > self.keys_at_once for end in ends)

    def _weights(self, scores, tile, k_tile, has_padding, scratch):
        scores, tile = self._sequenced((scores, tile))
        lse = plgpu.load(scratch["lse_smem"].at[tile, pl.ds(0, scores.shape[1])], layout=BY_COLUMN)
        exponents = self.exponents(scores) - along_columns(lse, scores.shape)
        # Rows of padding have scores of 0, possibly far above a low lse: exp2 would overflow, and inf times 0 is NaN in
        # dq. A bias of -inf, another id or what the scores of a quad start from prevents this.
        if self.compares_ids:
            of_keys = plgpu.load(scratch["k_ids_smem"].at[pl.ds(k_tile * ROWS, ROWS)], layout=BY_ROW)
            of_queries = plgpu.load(scratch["q_ids_smem"].at[tile, pl.ds(0, scores.shape[1])], layout=BY_COLUMN)
            exponents = jnp.where(tiles.same_id(of_keys, of_queries), exponents, -jnp.inf)
        elif has_padding and not self.bias_shape:
            exponents = jnp.minimum(exponents, 0.0)
        return jnp.exp2(exponents).astype(self.dtype)

    def _ds(self, weights, dp, tile, scratch):
        """Return dS from the rounded weights; a second copy in float32 would exceed the registers."""
        weights, dp, tile = self._sequenced((weights, dp, tile))
        delta = plgpu.load(scratch["delta_smem"].at[tile, pl.ds(0, dp.shape[1])], layout=BY_COLUMN)
        return (weights.astype(jnp.float32) * (dp - along_columns(delta, dp.shape))).astype(self.dtype)

    def _wait_for_buffer(self, tile, position, buffer, scratch):
        """Wait until delta is ready and the buffer of dS is free of an earlier tile's dS, or the previous dk and dv."""
        plgpu.barrier_wait(scratch["delta_ready"].at[tile])
        pl.when(position >= BUFFERS)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[buffer]))
        pl.when(position == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    # --- barriers that limit register pressure ------------------------------------------------------------------------

    def _sequenced(self, values: tuple) -> tuple:
        """Return the values behind a barrier that makes each depend on all; the interpreter has no such barrier."""
        return values if self.interpret else lax.optimization_barrier(values)
