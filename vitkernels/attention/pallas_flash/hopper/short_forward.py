"""The forward kernel of `pallas_flash` on Hopper for up to 256 queries and keys, and for quads of packed segments.

A persistent thread block loops over heads. A loader warpgroup requests the next head's queries, keys and values while
the compute warpgroups, 64 queries each, process the current head; shared memory holds both. Of heads with one or two
tiles, a thread block processes four or two at a time, by groups of warpgroups with buffers of their own.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import QUAD_COUNT, QUAD_END, QUAD_FIRST
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.per_head import NARROW, PerHeadKernel
from vitkernels.attention.pallas_flash.hopper.schedule import fits
from vitkernels.attention.pallas_flash.hopper.tiles import BY_COLUMN, BY_ROW, ROWS, at

BUFFERS = 2  # for heads
LOADER_REGISTERS = 32  # per thread


class ShortForward(PerHeadKernel, Forward):
    """The forward kernel for non-causal calls. Tiles have 64 rows; rows beyond the last token load as zeros."""

    @property
    def warpgroups(self) -> int:
        """Return the number of compute warpgroups: one per tile of queries."""
        return self.heads_at_once * self.query_tiles

    @property
    def _buffers(self) -> int:
        return BUFFERS * self.heads_at_once

    @property
    def registers(self) -> int:
        """Return the registers per thread of a compute warpgroup, from those allocated at launch."""
        at_launch = 65536 // (128 * (self.warpgroups + 1)) // 8 * 8
        return min(240, (at_launch * (self.warpgroups + 1) - LOADER_REGISTERS) // self.warpgroups // 8 * 8)

    @property
    def copies_bias(self) -> bool:
        """Return whether each tile of a bias is copied to shared memory ahead; otherwise, it is loaded to registers.

        Its slots take the place of the output, which is then stored through the tiles of queries.
        """
        count = self._buffers * (self.query_tiles + 2 * self.key_tiles)
        return self.bias_shape is not None and fits(count, self.warpgroups, self.bias_bytes, self.has_ids)

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, *extras):
        """Return out and log-sum-exp; see Forward.

        The chunks lie at multiples of 64, or form quads. Then the kernel writes only their rows and log-sum-exps.
        """

        def head_tiles(count):
            return tiles.tile(ROWS, self.head_dim, jnp.dtype(self.dtype), count)

        of_out = {"out_smem": head_tiles(self.warpgroups)}
        scratch = {
            "q_smem": head_tiles(self._buffers * self.query_tiles),
            "k_smem": head_tiles(self._buffers * self.key_tiles),
            "v_smem": head_tiles(self._buffers * self.key_tiles),
            "arrived": plgpu.Barrier(
                num_arrivals=self.copies * (self.query_tiles + 2 * self.key_tiles) + self.compares_ids,
                num_barriers=self._buffers,
            ),
            "consumed": plgpu.Barrier(num_arrivals=self.query_tiles, num_barriers=self._buffers),
            **(self.bias_scratch(self.warpgroups) if self.copies_bias else of_out),
            **self.quad_scratch(),
        }
        if self.compares_ids:
            scratch["k_ids_smem"] = plgpu.SMEM((self._buffers, self.key_tiles * ROWS), jnp.int32)
        outputs = self.rows(self.queries, self.heads), self.vector()
        kernel = self.launch(self._body, {"block": self.blocks}, self.warpgroups + 1, outputs, scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, *extras)

    def _body(self, q_ref, k_ref, v_ref, *refs, **scratch):
        scratch["bias_ref"], scratch["ids"], (out_ref, lse_ref) = self.extras(refs)
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < self.warpgroups)
        def _():
            plgpu.set_max_registers(self.registers, action="increase")
            group, _ = self._place_in_block()
            iterations = self.iterations(scratch["ids"], group)
            self._request_bias(jnp.int32(0), 0, iterations, scratch)

            @pl.loop(0, iterations)
            def _(iteration):
                self._attend(iteration, iterations, out_ref, lse_ref, scratch)

            if self.copies_bias:
                pl.when(iterations > 0)(lambda: self._release(iterations - 1, group, scratch))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.warpgroups)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
            iterations = [self.iterations(scratch["ids"], group) for group in range(self.heads_at_once)]
            self.request_place(jnp.int32(0), iterations[0], scratch["ids"], scratch)

            @pl.loop(0, iterations[0] + BUFFERS)  # the last iterations only wait for the last reads
            def _(iteration):
                for group, count in enumerate(iterations):
                    self._wait_for_buffer(iteration, count, group, scratch)
                    load = partial(self._load, iteration, count, group, (q_ref, k_ref, v_ref), scratch)
                    pl.when(iteration < count)(load)

    def _place_in_block(self) -> tuple:
        """Return the group of this compute warpgroup, and which tile of queries it computes."""
        warpgroup = lax.axis_index("warpgroup")
        if self.heads_at_once == 1:
            return 0, warpgroup
        return lax.div(warpgroup, self.query_tiles), lax.rem(warpgroup, self.query_tiles)

    def _buffer(self, iteration, group):
        """Return the number of the buffer that holds a group's head."""
        return lax.rem(iteration, BUFFERS) * self.heads_at_once + group

    def _wait_for_buffer(self, iteration, iterations, group, scratch) -> None:
        """Wait until the head before the previous one, if the group has it, has been read."""
        consumed = scratch["consumed"].at[self._buffer(iteration, group)]
        has_head = (iteration >= BUFFERS) & (iteration < iterations + BUFFERS)
        pl.when(has_head)(lambda: plgpu.barrier_wait(consumed))

    def _load(self, iteration, iterations, group, refs, scratch):
        buffer, ids = self._buffer(iteration, group), scratch["ids"]
        arrived = scratch["arrived"].at[buffer]
        self.wait_for_place(iteration, scratch)
        self.request_place(iteration + 1, iterations, ids, scratch)
        place = self.place_of(iteration, ids, scratch, group)
        if self.compares_ids:
            of_keys = ids[1].at[place.batch, pl.ds(0, self.key_tiles * ROWS)]
            plgpu.copy_gmem_to_smem(of_keys, scratch["k_ids_smem"].at[buffer], arrived)
        counts = self.query_tiles, self.key_tiles, self.key_tiles
        for ref, first, name, count in zip(refs, self.first_heads, "qkv", counts, strict=True):
            for tile in range(count):
                smem, slot = scratch[f"{name}_smem"], buffer * count + tile
                row = self.row_of(place, tile)
                tiles.load_rows(ref, place.batch, row, first + place.head, smem, slot, arrived, self.interpret)

    def _request_bias(self, iteration, step: int, iterations, scratch) -> None:
        """Start copying the bias of an iteration's tile of keys, if there is such an iteration."""
        if not self.copies_bias:
            return

        @pl.when(iteration < iterations)
        def _():
            group, tile = self._place_in_block()
            place = self.place_of(iteration, scratch["ids"], scratch, group)
            where = place.batch, place.head, tile * ROWS, step * ROWS, self._columns(step)
            self.copy_bias(self.bias_at(scratch["bias_ref"], *where), lax.axis_index("warpgroup"), scratch)

    def _release(self, iteration, group, scratch) -> None:
        """Release the buffer of an iteration that has stored its output through it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(scratch["consumed"].at[self._buffer(iteration, group)])

    def _attend(self, iteration, iterations, out_ref, lse_ref, scratch):
        group, tile = self._place_in_block()
        buffer = self._buffer(iteration, group)
        self.wait_for_place(iteration, scratch)
        place = self.place_of(iteration, scratch["ids"], scratch, group)
        if self.has_quads:
            carry = self._over_quad(place, tile, buffer, scratch)
        else:
            carry = self._over_keys(iteration, iterations, place, group, tile, scratch)
        if not self.copies_bias:
            plgpu.barrier_arrive(scratch["consumed"].at[buffer])
        out, lse = self.finalize(*carry)
        if self.has_quads:  # queries past a segment's end get weights of 0 in the backward kernel
            lse = jnp.where(tiles.row_numbers() < place.of_chunk(tile, QUAD_COUNT), lse, jnp.inf)
        lse_ref.at[place.batch, place.head, pl.ds((place.chunk + tile) * ROWS, ROWS)][...] = lse
        parts, index = scratch["q_smem"], buffer * self.query_tiles + tile
        if not self.copies_bias:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head was stored
            parts, index = scratch["out_smem"], group * self.query_tiles + tile
        self.store_tiles(parts, index, [out], out_ref, place, place.head, tile)

    def _over_keys(self, iteration, iterations, place, group, tile, scratch) -> tuple:
        """Return output, maximum and sum over all keys."""
        buffer = self._buffer(iteration, group)

        def bias_of(step):
            if self.bias_shape is None:
                return None
            where = place.batch, place.head, tile * ROWS, step * ROWS, self._columns(step)
            return groups.load(self.bias_at(scratch["bias_ref"], *where), self.interpret)

        def request_after(step):
            is_last = step + 1 == self.key_tiles
            self._request_bias(iteration + is_last, 0 if is_last else step + 1, iterations, scratch)

        carry, q_ids = self.initial_carry(), None
        bias = None if self.copies_bias else bias_of(0)
        if self.has_ids:  # from device memory: at 256 tokens, shared memory has no room for them
            of_queries = scratch["ids"][0].at[place.batch, pl.ds(tile * ROWS, ROWS)]
            q_ids = plgpu.load(of_queries, layout=BY_ROW, optimized=False)
        plgpu.barrier_wait(scratch["arrived"].at[buffer])
        for step in range(self.key_tiles):
            if self.copies_bias:
                bias = self.copied_bias(group * self.query_tiles + tile, self._columns(step), scratch)
            carry, bias = self._add(step, tile, buffer, q_ids, carry, bias, bias_of, request_after, scratch)
            if self.copies_bias and step == 0:
                pl.when(iteration > 0)(lambda: self._release(iteration - 1, group, scratch))
        return carry

    def _over_quad(self, place, tile, buffer, scratch) -> tuple:
        """Return output, maximum and sum over the keys of the tile's segment."""
        first, end = (place.of_chunk(tile, field) - place.of_chunk(0, QUAD_FIRST) for field in (QUAD_FIRST, QUAD_END))
        plgpu.barrier_wait(scratch["arrived"].at[buffer])

        def add(columns, step, carry):
            q, k, v = self._tiles(step, tile, buffer, scratch)
            (scores,) = tiles.products((None, q, tiles.first_rows(k, columns or ROWS)), interpret=self.interpret)
            keep = tiles.position(scores.shape, 1) < place.of_chunk(step, QUAD_COUNT) if columns else None
            weights, out, highest, total = self.softmax_step(scores, 0, 0, scores.shape[1], carry, keep)
            return self._with_values(weights, v, out), highest, total

        # A segment's last tile may have few keys, as in 197 = 3 * 64 + 5.
        keys_of_last = place.of_chunk(lax.max(end - 1, 0), QUAD_COUNT)
        full = lax.max(end - (keys_of_last < ROWS).astype(jnp.int32), first)
        wide = jnp.where(keys_of_last <= NARROW, full, end)
        carry = lax.fori_loop(first, full, partial(add, None), self.initial_carry())
        carry = lax.fori_loop(full, wide, partial(add, ROWS), carry)
        return lax.fori_loop(wide, end, partial(add, NARROW), carry)

    def _tiles(self, step, tile, buffer, scratch) -> tuple:
        """Return the own tile of queries, and a tile of keys and of values."""
        slot = buffer * self.key_tiles + step
        q = at(scratch["q_smem"], buffer * self.query_tiles + tile)
        return q, at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)

    def _with_values(self, weights, v, out) -> tuple:
        return tiles.accumulated(out, [(i, weights, part) for i, part in enumerate(v)], self.interpret)

    def _keys(self, step: int) -> int:
        return min(ROWS, self.keys_at_once - step * ROWS)

    def _columns(self, step: int) -> int:
        """Return the columns of a tile's scores."""
        return tiles.padded_columns(self._keys(step))

    def _add(self, step, tile, buffer, q_ids, carry, bias, bias_of, request_after, scratch):
        """Fold one tile of keys into the running output, maximum and sum.

        Return also the next tile's bias, if it is in registers.
        """
        q, k, v = self._tiles(step, tile, buffer, scratch)
        k = tiles.first_rows(k, self._columns(step))
        (scores,) = tiles.products((bias, q, k), interpret=self.interpret)
        request_after(step)
        keep = None
        if q_ids is not None:
            where = buffer, pl.ds(step * ROWS, self._columns(step))
            keep = tiles.same_id(q_ids, plgpu.load(scratch["k_ids_smem"].at[where], layout=BY_COLUMN))
        weights, out, highest, total = self.softmax_step(scores, 0, step * ROWS, self._keys(step), carry, keep)
        # Requested before the product with values, which hides part of its latency; before the weights are computed,
        # it would exceed the registers.
        bias = None if self.copies_bias or step + 1 == self.key_tiles else bias_of(step + 1)
        return (self._with_values(weights, v, out), highest, total), bias
