"""Persistent thread blocks of `pallas_flash` on Hopper: each loops over work items, fed through a ring of tiles.

A loader warpgroup requests an item's own rows and its tiles (see work_items.py) ahead of use: the tiles through a ring
buffer that continues across work items, own rows into separate buffers, so that the next item's rows have arrived when
the current item ends.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import async_product, groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import COUNT
from vitkernels.attention.pallas_flash.hopper.row_registers import store_first_rows
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, widths
from vitkernels.attention.pallas_flash.hopper.tiles import WGMMA, at
from vitkernels.attention.pallas_flash.hopper.work_items import Side, WorkItem, WorkItems


class Stream(NamedTuple):
    """A stream of tiles through the ring, or through slots of its own."""

    load: Callable  # (item, tile, slot): request a tile
    arrived: Any  # barriers, one per slot
    consumed: Any  # barriers that the compute warpgroups arrive at to release a slot
    slots: int

    def slot(self, step):
        """Return the slot of a tile, given how many tiles streamed before it."""
        return lax.rem(step, self.slots)


class OwnRows(NamedTuple):
    """The rows of a work item that a warpgroup keeps."""

    load: Callable  # (item, warpgroup): request the rows
    arrived: tuple  # barriers, one per owner
    consumed: Any  # barriers that a warpgroup arrives at to release the rows' buffer


class RingKernel(WorkItems):
    """A kernel whose persistent thread blocks follow a Schedule."""

    narrow_widths = (16,)  # of a packed segment's last tile, descending

    def own_tiles(self) -> tuple:
        """Return scratch for the rows that each warpgroup keeps."""
        return tiles.tile(ROWS, self.head_dim, jnp.dtype(self.dtype), self.owners)

    @property
    def owners(self) -> int:
        """Return the number of buffers of 64 own rows."""
        return self.schedule.buffers * self.schedule.warpgroups

    def operand(self, parts: tuple) -> tuple:
        """Return own rows as the first operand of products: in registers where they fit, which spares bandwidth.

        The interpreter does not support operands in registers.
        """
        fits = 64 < sum(widths(self.head_dim)) <= 96
        return tuple(plgpu.load(part, layout=WGMMA) for part in parts) if fits and not self.interpret else parts

    def ring(self) -> tuple:
        """Return scratch for the streamed tiles."""
        return tiles.tile(self.schedule.tile, self.head_dim, jnp.dtype(self.dtype), self.schedule.stages)

    def ring_for_products(self) -> tuple:
        """Return scratch for streamed tiles that are second operands of products; see async_product.py."""
        return async_product.ring(self.schedule.stages, self.schedule.tile, self.head_dim, jnp.dtype(self.dtype))

    def stream(self, load: Callable, arrived, consumed) -> Stream:
        """Return a stream through the ring."""
        return Stream(load, arrived, consumed, self.schedule.stages)

    def bias_scratch(self) -> dict:
        """Return scratch for the bias of each warpgroup's own rows and a streamed tile; nothing without a bias."""
        if not self.bias_shape:
            return {}
        s = self.schedule
        barrier = plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=s.bias_slots)
        smem = self.bias_tiles(s.bias_slots, s.warpgroups, columns=s.tile)
        return {"bias_smem": smem, "bias_arrived": barrier, "bias_consumed": barrier}

    def bias_streams(self, scratch: dict) -> list[Stream]:
        """Return the stream of the bias, whose slots are free again once the scores of a tile start from it."""
        if not self.bias_shape:
            return []
        arrived, columns = scratch["bias_arrived"], self.schedule.tile

        def load(item, tile, slot):
            for warpgroup in range(self.schedule.warpgroups):
                where = item.batch, item.head, self.first_row(item, warpgroup), tile * columns, columns
                smem = scratch["bias_smem"].at[slot, warpgroup]
                groups.copy(self.bias_at(scratch["bias_ref"], *where), smem, arrived.at[slot])

        return [Stream(load, arrived, scratch["bias_consumed"], self.schedule.bias_slots)]

    def start_of_scores(self, item: WorkItem, step, warpgroup, columns: int, scratch: dict):
        """Return what the scores of own rows and a streamed tile start from: the bias, or None."""
        if not self.bias_shape:
            return None
        slot = lax.rem(item.streamed + step, self.schedule.bias_slots)
        plgpu.barrier_wait(scratch["bias_arrived"].at[slot])
        smem = scratch["bias_smem"].at[slot, warpgroup, pl.ds(0, columns // groups.COLUMNS)]
        return groups.load(smem, self.interpret)

    def release_bias(self, item: WorkItem, step, scratch: dict) -> None:
        """Release the bias that a tile's product of scores, which has ended, started from."""
        if self.bias_shape:
            slot = lax.rem(item.streamed + step, self.schedule.bias_slots)
            plgpu.barrier_arrive(scratch["bias_consumed"].at[slot])

    def own_ids(self) -> plgpu.SMEM:
        return plgpu.SMEM((self.owners, ROWS), jnp.int32)

    def ring_of_ids(self) -> plgpu.SMEM:
        return plgpu.SMEM((self.schedule.stages, self.schedule.tile), jnp.int32)

    def arrived(self, arrivals: int) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.schedule.stages)

    def consumed(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=self.schedule.warpgroups, num_barriers=self.schedule.stages)

    def own_arrived(self, arrivals: int) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.owners)

    def own_consumed(self) -> plgpu.Barrier:
        return plgpu.Barrier(num_arrivals=1, num_barriers=self.owners)

    def kernel(self, body, own_rows: int, out_type: tuple, scratch: dict):
        """Return `body` as a kernel whose work items have at most 64 * warpgroups of `own_rows`, or are listed."""
        scratch |= self.record_scratch()
        return self.launch(body, {"block": self.blocks(own_rows)}, self.schedule.warpgroups + 1, out_type, scratch)

    @property
    def tile_copies(self) -> int:
        """Return the number of copies that load a streamed tile."""
        return self.copies * (self.schedule.tile // ROWS if self.copies_chunks else 1)

    def load_tile(self, ref, item: WorkItem, side: Side, tile, head, parts: tuple, slot, barrier) -> None:
        """Request a streamed tile of one head; the barrier gets tile_copies arrivals."""
        if not self.copies_chunks:
            row = item.row + (tile - item.first) * self.schedule.tile
            tiles.load_rows(ref, item.batch, row, head, parts, slot, barrier, self.interpret)
            return
        for chunk in range(self.schedule.tile // ROWS):
            row = side.row(item.batch, tile * self.schedule.tile + chunk * ROWS)
            tiles.load_rows(ref, item.batch, row, head, parts, slot, barrier, self.interpret, chunk)

    @property
    def compared_widths(self) -> tuple[int, ...]:
        """Return the narrower widths, descending, that a segment's last tile may have if it compares ids."""
        return tuple(w for w in self.narrow_widths if w < self.schedule.tile) if self.keeps_to_segments else ()

    # --- tiles and own rows -------------------------------------------------------------------------------------------

    def owner(self, number, warpgroup):
        """Return the shared-memory index of a warpgroup's own rows for the block's item with this number."""
        return lax.rem(number, self.schedule.buffers) * self.schedule.warpgroups + warpgroup

    def slot(self, item: WorkItem, step):
        """Return the ring slot of a streamed tile."""
        return lax.rem(item.streamed + step, self.schedule.stages)

    def tile_of_step(self, item: WorkItem, step):
        """Return the number of the tile that streams past an item in a step."""
        return item.first + step

    def over_tiles(self, item: WorkItem, tokens: int, step_of, carry, after_first_tile, all_full: bool = False):
        """Fold step_of(step, carry, tokens, compares) over the streamed tiles; return the final carry.

        The last tile gets only its valid tokens, unless all_full. after_first_tile() is called after the first step.
        compares: whether ids must be compared in this tile.
        """
        width, fold = self.schedule.tile, functools.partial(_folding, step_of, after_first_tile)
        if self.has_ids:
            carry = lax.fori_loop(0, item.uncompared, fold(width, False), carry)
            return self.over_compared_tiles(item, step_of, carry, after_first_tile)
        full, last = (item.steps, 0) if all_full else divmod(tokens, width)
        carry = lax.fori_loop(0, full, fold(width, False), carry)
        if not last:
            return carry
        # A loop of one step, whose end the compiler does not know. As code behind the other loop, the step would make
        # ptxas 13.0 spill accumulators, and with more than 88 tokens serialize all products.
        return lax.fori_loop(full, self.opaque(full + 1), fold(last, False), carry)

    def over_compared_tiles(self, item: WorkItem, step_of, carry, after_first_tile):
        """Do what over_tiles does for the tiles in which ids must be compared: all but the first item.uncompared."""
        fold = functools.partial(_folding, step_of, after_first_tile)
        start, width = item.uncompared, self.schedule.tile
        for narrower in self.compared_widths:
            end = lax.max(start, item.steps - (item.last <= narrower).astype(jnp.int32))
            carry = lax.fori_loop(start, end, fold(width, True), carry)
            start, width = end, narrower
        carry = lax.fori_loop(start, item.steps, fold(width, True), carry)
        pl.when(item.steps == 0)(after_first_tile)
        return carry

    def store_own(self, item: WorkItem, warpgroup, own: Side, results: list[tuple]) -> None:
        """Start storing results of own rows: (parts in shared memory, values, array, head)."""
        owner, place = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        row, count = self.own_row(item, own, place), self.own_count(item, own, place)

        def store_chunk():
            for parts, values, *_ in results:
                for part, x in zip(at(parts, owner), values, strict=True):
                    part[...] = x.astype(part.dtype)
            plgpu.commit_smem()
            for parts, _, ref, head in results:
                tiles.store_rows(parts, owner, ref, item.batch, row, head, self.interpret)

        if own.chunks is None:
            store_chunk()
            return
        pl.when(count == ROWS)(store_chunk)

        @pl.when(count < ROWS)
        def _():
            record = own.chunks.at[item.batch, lax.div(place, ROWS)]
            for _, values, ref, head in results:
                store_first_rows(ref.at[item.batch, :, head], values, row, record, COUNT, self.interpret)

    # --- warp specialization ------------------------------------------------------------------------------------------

    def divide_roles(self, side: Side, with_span, own: OwnRows, streams: list[Stream], compute, scratch: dict) -> None:
        """Run compute(item, warpgroup, after_first_tile) on the compute warpgroups while the loader requests rows.

        Args:
            side: that of the own rows.
            with_span: with_span(item) returns the item with the tiles that stream past it.
            compute: must call after_first_tile() after some work, when the previous item's stores have completed; this
                releases the previous item's buffer.
            scratch: the kernel's; with listed items, it holds their records.
        """
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < self.schedule.warpgroups)
        def _():
            plgpu.set_max_registers(self.schedule.registers[0], action="increase")

            def give_back(number):
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(own.consumed.at[self.owner(number, warpgroup)])

            def process(item):
                def after_first_tile():
                    if self.schedule.buffers > 1:
                        pl.when(item.number > 0)(lambda: give_back(item.number - 1))

                has_rows = self.has_rows(side, item, warpgroup)
                pl.when(has_rows)(lambda: compute(item, warpgroup, after_first_tile))
                pl.when(~has_rows)(lambda: self._pass_through(item, warpgroup, after_first_tile, own, streams))
                if self.schedule.buffers == 1:
                    give_back(item.number)

            items, _ = self.for_each_assigned_item(self.assigned_items(side), side, with_span, process, scratch)
            if self.schedule.buffers > 1:
                # With ids, the number of items is known only here, and a block may have none.
                last = lambda: give_back(items - 1)  # noqa: E731
                last() if side.used is None else pl.when(items > 0)(last)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.schedule.warpgroups)
        def _():
            plgpu.set_max_registers(self.schedule.registers[1], action="decrease")

            # Each role computes this itself: before they divide, a thread has fewer registers, and would spill it.
            assigned = self.assigned_items(side)
            for_each_item = lambda process: self.for_each_assigned_item(assigned, side, with_span, process, scratch)  # noqa: E731

            def load(item, warpgroup):
                own.load(item, warpgroup)
                if warpgroup == self.schedule.warpgroups - 1:  # all have given back the rows before
                    self.request_record(item.number + 1, assigned, side, scratch)

            self.request_record(0, assigned, side, scratch)
            self._request(for_each_item, own._replace(load=load), streams)

    def _pass_through(self, item: WorkItem, warpgroup, after_first_tile, own: OwnRows, streams: list[Stream]) -> None:
        """Consume an item's barriers on a warpgroup without rows."""
        after_first_tile()
        for arrived in own.arrived:
            plgpu.barrier_wait(arrived.at[self.owner(item.number, warpgroup)])

        @pl.loop(0, item.steps)
        def _(step):
            for stream in streams:
                slot = stream.slot(item.streamed + step)
                plgpu.barrier_wait(stream.arrived.at[slot])
                plgpu.barrier_arrive(stream.consumed.at[slot])

    def _request(self, for_each_item, own: OwnRows, streams: list[Stream]) -> tuple:
        """Run the loader: request own rows and streamed tiles as buffers and slots become free.

        for_each_item(process) calls process(item), and returns the number of items and of streamed tiles; so does this.
        """
        s = self.schedule

        def wait_for_buffer(number, warpgroup):
            consumed = own.consumed.at[self.owner(number, warpgroup)]
            pl.when(number >= s.buffers)(lambda: plgpu.barrier_wait(consumed))

        def wait_for_slot(stream, step):
            consumed = stream.consumed.at[stream.slot(step)]
            pl.when(step >= stream.slots)(lambda: plgpu.barrier_wait(consumed))

        def process(item):
            for warpgroup in range(s.warpgroups):
                wait_for_buffer(item.number, warpgroup)
                own.load(item, warpgroup)

            @pl.loop(0, item.steps)
            def _(step):
                for stream in streams:
                    wait_for_slot(stream, item.streamed + step)
                    stream.load(item, self.tile_of_step(item, step), stream.slot(item.streamed + step))

        items, streamed = for_each_item(process)
        # Every phase of a barrier must be waited for.
        for stream in streams:
            for i in range(stream.slots):
                wait_for_slot(stream, streamed + i)
        for i in range(s.buffers):
            for warpgroup in range(s.warpgroups):
                wait_for_buffer(items + i, warpgroup)
        return items, streamed


def _folding(step_of, after_first_tile, tokens: int, compares: bool) -> Callable:
    """Return a loop's body: step_of(step, carry, tokens, compares), and after_first_tile() after the first step."""

    def body(step, carry):
        carry = step_of(step, carry, tokens, compares)
        pl.when(step == 0)(after_first_tile)
        return carry

    return body
