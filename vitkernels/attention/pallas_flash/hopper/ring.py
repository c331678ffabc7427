"""Persistent thread blocks of `pallas_flash` on Hopper: each loops over work items, fed through a ring of tiles.

A work item is a set of own rows of one head, which the compute warpgroups keep, and the tiles of that head that stream
past them. A loader warpgroup requests both ahead of use: the tiles through a ring buffer that continues across work
items, own rows into separate buffers, so that the next item's rows have arrived when the current item ends.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import (
    COMPARED,
    COUNT,
    END,
    FIRST,
    ITEM,
    ITEM_CHUNKS,
    ITEM_COMPARED,
    ITEM_END,
    ITEM_FIRST,
    ITEM_ROW,
    ITEM_TOKENS,
    ITEMS,
    ROW,
    SEGMENT_TOKENS,
    USED_KEYS,
    USED_QUERIES,
    prefers_fused,
)
from vitkernels.attention.pallas_flash.hopper.row_registers import store_first_rows
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, takes_quads, widths
from vitkernels.attention.pallas_flash.hopper.tiles import WGMMA, at


class WorkItem(NamedTuple):
    """The unit of work of a thread block: own rows of a head, at most 64 per compute warpgroup.

    All fields are integers.
    """

    batch: Any
    head: Any
    tile: Any  # its number in the head, or that of a listed item in its batch entry's list
    number: Any  # how many items this block processed before
    streamed: Any  # how many tiles streamed for those items
    first: Any = 0  # the first tile that streams past this item
    steps: Any = 0  # how many tiles stream past this item
    uncompared: Any = 0  # of how many of these, from the first on, all rows have the ids of the own rows
    row: Any = 0  # the first row of the first of these
    last: Any = 0  # how many rows of the last of these are the segment's; of entries not moved, not padding
    chunk: Any = 0  # the first of its chunks of own rows
    chunks: Any = 0  # how many it has, one per warpgroup at most


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


class Side(NamedTuple):
    """The queries or the keys of a call; with ids, references to what `token_ids` returns for them."""

    tokens: int
    ids: Any = None
    chunks: Any = None
    are_moved: bool = False  # chunks start where segments start
    used: Any = None  # how many of the chunks of a batch entry are used, or how many work items are listed
    counts: Any = None  # all counts, if the fused backward kernel may process the chunks instead

    def row(self, batch, place):
        """Return the row that has a place, a multiple of 64, in the order of ids and vectors."""
        return self.chunks[batch, lax.div(jnp.int32(place), ROWS), ROW] if self.are_moved else place

    def count(self, batch, place):
        """Return how many of the rows from a place on are those of its chunk; the others must not be stored."""
        return ROWS if self.chunks is None else self.chunks[batch, lax.div(place, ROWS), COUNT]


class RingKernel(tiles.HopperKernel):
    """A kernel whose persistent thread blocks follow a Schedule."""

    # Widths of a narrowed tile of 128 rows. 577 = 4 * 128 + 65.
    narrow_widths = 72, 16

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

    def sides(self, ids: tuple) -> tuple[Side, Side]:
        """Return queries and keys, given a kernel's ids: those of `token_ids`, or none."""
        if not ids:
            return Side(self.queries), Side(self.keys)
        q_ids, k_ids, q_chunks, k_chunks, used = ids
        # Only the forward kernel has listed items; their chunks are those of queries.
        of_queries = used.at[ITEMS if self.schedule.is_listed else USED_QUERIES]
        are_moved = tiles.has_packed_segments(self.queries, self.chunks)
        queries = Side(self.queries, q_ids, q_chunks, are_moved, of_queries)
        return queries, Side(self.keys, k_ids, k_chunks, are_moved, used.at[USED_KEYS])

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
        return self.launch(body, {"block": self.blocks(own_rows)}, self.schedule.warpgroups + 1, out_type, scratch)

    @property
    def _copies_chunks(self) -> bool:
        """Return whether chunks are copied one by one, because a streamed tile may hold those of two segments."""
        return tiles.has_packed_segments(self.queries, self.chunks) and not takes_quads(self.head_dim)

    @property
    def tile_copies(self) -> int:
        """Return the number of copies that load a streamed tile."""
        return self.copies * (self.schedule.tile // ROWS if self._copies_chunks else 1)

    def load_tile(self, ref, item: WorkItem, side: Side, tile, head, parts: tuple, slot, barrier) -> None:
        """Request a streamed tile of one head; the barrier gets tile_copies arrivals."""
        if not self._copies_chunks:
            row = item.row + (tile - item.first) * self.schedule.tile
            tiles.load_rows(ref, item.batch, row, head, parts, slot, barrier, self.interpret)
            return
        for chunk in range(self.schedule.tile // ROWS):
            row = side.row(item.batch, tile * self.schedule.tile + chunk * ROWS)
            tiles.load_rows(ref, item.batch, row, head, parts, slot, barrier, self.interpret, chunk)

    @property
    def _narrow_widths(self) -> tuple[int, ...]:
        """Return the widths, descending, to which a packed segment's last tile is narrowed if its rows fit."""
        may_narrow = tiles.has_packed_segments(self.queries, self.chunks) and not self._copies_chunks
        return self.narrow_widths if may_narrow and self.schedule.tile == 2 * ROWS else ()

    # --- indices ------------------------------------------------------------------------------------------------------

    def tiles(self, own_rows: int) -> int:
        """Return the number of work items per head, without chunks that start where segments start."""
        return pl.cdiv(own_rows, ROWS * self.schedule.warpgroups)

    def work_items(self, own_rows: int) -> int:
        return self.batch * self.heads * self.tiles(own_rows)

    def divided(self, index, own_rows: int) -> tuple:
        """Return batch, head and tile of the item with this index."""
        head, tile = lax.div(index, self.tiles(own_rows)), lax.rem(index, self.tiles(own_rows))
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile

    def blocks(self, own_rows: int) -> int:
        items = self.work_items(own_rows)
        if tiles.has_packed_segments(self.queries, self.chunks):  # the device knows how many
            items = self.batch * self.heads * self.chunks[0]
        return min(self.multiprocessors, items)

    def heads_of(self, item: WorkItem) -> tuple:
        """Return the indices of the item's head in q, k and v."""
        return tuple(item.head + first for first in self.first_heads)

    def tile_of_rows(self, item: WorkItem):
        """Return the number of an item's block of own rows in its head."""
        return item.tile

    def _with_chunks(self, item: WorkItem, side: Side) -> WorkItem:
        """Return the item with its chunks of own rows.

        Without ids, the chunks of a head are divided evenly: 10 are 2 + 3 + 2 + 3, not 3 + 3 + 3 + 1. That takes up to
        2.5 % less time in the backward kernels on an H200.
        """
        if self.schedule.is_listed:
            chunk, chunks = (side.chunks[item.batch, item.tile, field] for field in (ITEM, ITEM_CHUNKS))
            return item._replace(chunk=chunk, chunks=chunks)
        tile, warpgroups = self.tile_of_rows(item), self.schedule.warpgroups
        if side.chunks is not None:
            return item._replace(chunk=tile * warpgroups, chunks=warpgroups)
        chunks = pl.cdiv(side.tokens, ROWS)
        items = pl.cdiv(chunks, warpgroups)
        first, end = (lax.div(i * chunks, items) for i in (tile, tile + 1))
        return item._replace(chunk=first, chunks=end - first)

    def first_row(self, item: WorkItem, warpgroup):
        """Return the first of a warpgroup's own rows; with ids, its place (see Side.row)."""
        if self.schedule.is_listed:
            # A warpgroup without rows gets those of another one, lest it read beyond the chunks. An empty item has no
            # rows.
            warpgroup = lax.max(lax.min(warpgroup, item.chunks - 1), 0)
        return (item.chunk + warpgroup) * ROWS

    def _has_rows(self, own: Side, item: WorkItem, warpgroup):
        has_chunk = warpgroup < item.chunks
        if own.chunks is None:
            return has_chunk
        # An empty item has no steps.
        return has_chunk & (item.steps > 0) & (self._own_count(item, own, self.first_row(item, warpgroup)) > 0)

    @property
    def keeps_to_segments(self) -> bool:
        """Return whether an item's own and streamed rows are those of one packed segment.

        They are with quads: all other segments have an even number of chunks, and of those that are not empty, two.
        """
        return tiles.has_packed_segments(self.queries, self.chunks) and not self._copies_chunks

    def own_row(self, item: WorkItem, side: Side, place):
        """Return the row that has a place, a multiple of 64, among the item's own rows; see Side.row."""
        if self.keeps_to_segments:
            return item.row + self._place_in_segment(item, place)
        return side.row(item.batch, place)

    def _own_count(self, item: WorkItem, side: Side, place):
        """Return how many of the rows from a place on are those of its chunk; see Side.count."""
        if self.keeps_to_segments:
            tokens = item.last + (item.steps - 1) * self.schedule.tile
            return lax.clamp(0, tokens - self._place_in_segment(item, place), ROWS)
        return side.count(item.batch, place)

    def _place_in_segment(self, item: WorkItem, place):
        return place - item.first * self.schedule.tile

    def owner(self, number, warpgroup):
        """Return the shared-memory index of a warpgroup's own rows for the block's item with this number."""
        return lax.rem(number, self.schedule.buffers) * self.schedule.warpgroups + warpgroup

    def slot(self, item: WorkItem, step):
        """Return the ring slot of a streamed tile."""
        return lax.rem(item.streamed + step, self.schedule.stages)

    def with_span(self, item: WorkItem, own: Side, streamed: Side) -> WorkItem:
        """Return the item with the tiles that stream past it."""
        if own.chunks is None:
            return item._replace(steps=pl.cdiv(streamed.tokens, self.schedule.tile))
        if self.keeps_to_segments:
            return self._with_segment(item, own)
        first, steps, uncompared = self._span_of(item, own)
        item = item._replace(first=first, steps=steps, uncompared=uncompared, row=first * self.schedule.tile)
        if not streamed.are_moved:
            return item
        row = streamed.row(item.batch, lax.min(item.row, (self.chunks[0] - 1) * ROWS))  # an empty item has no tile
        record, field = item.tile * self.schedule.warpgroups, SEGMENT_TOKENS
        if self.schedule.is_listed:
            record, field = item.tile, ITEM_TOKENS
        return item._replace(row=row, last=own.chunks[item.batch, record, field] - (steps - 1) * self.schedule.tile)

    def _with_segment(self, item: WorkItem, own: Side) -> WorkItem:
        """Return the item with the tiles of its segment, which are known from one record."""
        fields, record = (ITEM_FIRST, ITEM_END, ITEM_COMPARED, ITEM_ROW, ITEM_TOKENS), item.tile
        if not self.schedule.is_listed:
            fields, record = (FIRST, END, COMPARED, ROW, SEGMENT_TOKENS), item.chunk
        first, end, limit, row, tokens = (own.chunks[item.batch, record, field] for field in fields)
        if not self.schedule.is_listed:
            row -= (item.chunk - first) * ROWS
        first, steps, uncompared = self._tiles_of(first, end, limit)
        last = tokens - (steps - 1) * self.schedule.tile
        return item._replace(first=first, steps=steps, uncompared=uncompared, row=row, last=last)

    def _span_of(self, item: WorkItem, own: Side) -> tuple:
        """Return the first of the tiles that an item's chunks need, their number, and how many need no comparison."""
        if self.schedule.is_listed:
            fields = ITEM_FIRST, ITEM_END, ITEM_COMPARED
            return self._tiles_of(*(own.chunks[item.batch, item.tile, field] for field in fields))
        first_chunk, records = item.tile * self.schedule.warpgroups, []
        for i in range(self.schedule.warpgroups):
            records.append([own.chunks[item.batch, first_chunk + i, field] for field in (FIRST, END, COMPARED)])
        firsts, ends, compared = zip(*records, strict=True)
        first, end = functools.reduce(lax.min, firsts), functools.reduce(lax.max, ends)
        # The comparison begins at `first` for a chunk that needs other chunks than the first one does.
        limits = [
            jnp.where((own_first == first) | (own_end == 0), limit, first)
            for own_first, own_end, limit in zip(firsts, ends, compared, strict=True)
        ]
        return self._tiles_of(first, end, functools.reduce(lax.min, limits))

    def _tiles_of(self, first, end, limit) -> tuple:
        """Return _span_of for the chunks from first to end, which must be compared from `limit` on."""
        per_tile = self.schedule.tile // ROWS
        first_tile = lax.div(first, per_tile)
        steps = lax.max(lax.div(end + per_tile - 1, per_tile) - first_tile, 0)
        uncompared = jnp.where(lax.rem(first, per_tile) == 0, lax.div(limit, per_tile) - first_tile, 0)
        return first_tile, steps, lax.clamp(0, uncompared, steps)

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

    def over_compared_tiles(self, item: WorkItem, step_of, carry, after_first_tile, narrow_widths=None):
        """Do what over_tiles does for the tiles in which ids must be compared: all but the first item.uncompared.

        narrow_widths: the widths, descending, to which a segment's last tile is narrowed; by default, those of the kernel.
        """
        fold = functools.partial(_folding, step_of, after_first_tile)
        start, width = item.uncompared, self.schedule.tile
        for narrower in self._narrow_widths if narrow_widths is None else narrow_widths:
            end = lax.max(start, item.steps - (item.last <= narrower).astype(jnp.int32))
            carry = lax.fori_loop(start, end, fold(width, True), carry)
            start, width = end, narrower
        carry = lax.fori_loop(start, item.steps, fold(width, True), carry)
        pl.when(item.steps == 0)(after_first_tile)
        return carry

    def store_own(self, item: WorkItem, warpgroup, own: Side, results: list[tuple]) -> None:
        """Start storing results of own rows: (parts in shared memory, values, array, head)."""
        owner, place = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        row, count = self.own_row(item, own, place), self._own_count(item, own, place)

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

    def divide_roles(self, side: Side, with_span, own: OwnRows, streams: list[Stream], compute) -> None:
        """Run compute(item, warpgroup, after_first_tile) on the compute warpgroups while the loader requests rows.

        Args:
            side: that of the own rows.
            with_span: with_span(item) returns the item with the tiles that stream past it.
            compute: must call after_first_tile() after some work, when the previous item's stores have completed; this
                releases the previous item's buffer.
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

                has_rows = self._has_rows(side, item, warpgroup)
                pl.when(has_rows)(lambda: compute(item, warpgroup, after_first_tile))
                pl.when(~has_rows)(lambda: self._pass_through(item, warpgroup, after_first_tile, own, streams))
                if self.schedule.buffers == 1:
                    give_back(item.number)

            items, _ = self._for_each_item(side, with_span, process)
            if self.schedule.buffers > 1:
                # With ids, the number of items is known only here, and a block may have none.
                last = lambda: give_back(items - 1)  # noqa: E731
                last() if side.used is None else pl.when(items > 0)(last)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.schedule.warpgroups)
        def _():
            plgpu.set_max_registers(self.schedule.registers[1], action="decrease")
            self._request(lambda process: self._for_each_item(side, with_span, process, reads_ahead=True), own, streams)

    def _for_each_item(self, side: Side, with_span, process, reads_ahead: bool = False) -> tuple:
        """Call process(item) for all of this block's items; return the number of items and of streamed tiles.

        reads_ahead: read an item's record, if it has one, before the item before it is processed.

        The items of a head run concurrently on different blocks, so that they share its tiles in the L2 cache. The
        assignment rotates, so that each block gets both early and late items of a head.
        """
        blocks = self.blocks(side.tokens)
        items, divided = self.work_items(side.tokens), lambda index: self.divided(index, side.tokens)
        if side.used is not None:
            tiles = side.used[...] if side.counts is None else jnp.where(prefers_fused(side.counts), 0, side.used[...])
            if not self.schedule.is_listed:
                tiles = lax.div(tiles + self.schedule.warpgroups - 1, self.schedule.warpgroups)
            items, divided = self.batch * self.heads * tiles, lambda index: self._divided(index, lax.max(tiles, 1))
        share = lax.div(jnp.int32(items), blocks)

        def index(number):
            return number * blocks + lax.rem(lax.axis_index("block") + number, blocks)

        def item_at(index, number, streamed):
            return with_span(self._with_chunks(WorkItem(*divided(index), number, streamed), side))

        count = share + (index(share) < items).astype(jnp.int32)
        if reads_ahead and side.used is not None:
            last = lax.max(items - 1, 0)  # a block may have no item
            return count, self._for_each_read_ahead(lambda number: item_at(lax.min(index(number), last), 0, 0), count, process)

        def body(number, streamed):
            item = item_at(index(number), number, streamed)
            process(item)
            return streamed + item.steps

        return count, lax.fori_loop(0, count, body, jnp.int32(0))

    def _for_each_read_ahead(self, read, count, process):
        """Call process(item) for `count` items; read the item with a number before the one before it is processed.

        Return the number of streamed tiles.
        """

        def read_integers(number):
            return jax.tree.map(jnp.int32, read(number))

        def body(number, carry):
            streamed, item = carry
            following = read_integers(lax.min(number + 1, count - 1))
            process(item._replace(number=number, streamed=streamed))
            return streamed + item.steps, following

        streamed, _ = lax.fori_loop(0, count, body, (jnp.int32(0), read_integers(0)))
        return streamed

    def _divided(self, index, tiles) -> tuple:
        """Return batch, head and tile of an item, of which each head has `tiles`; heads come first.

        Some of these may be empty, at the end of a batch entry.
        """
        entry, head = lax.div(index, self.heads), lax.rem(index, self.heads)
        return lax.div(entry, tiles), head, lax.rem(entry, tiles)

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
                    stream.load(item, item.first + step, stream.slot(item.streamed + step))

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
