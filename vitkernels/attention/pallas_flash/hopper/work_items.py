"""Work items of the ring kernels of `pallas_flash` on Hopper: which rows a thread block processes, and in which order.

A work item is a set of own rows of one head, which the compute warpgroups keep, and the tiles of that head that stream
past them.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.chunks import (
    COMPARED,
    COUNT,
    END,
    FIELDS,
    FIRST,
    ITEM,
    ITEM_CHUNKS,
    ITEM_COMPARED,
    ITEM_END,
    ITEM_ENTRY,
    ITEM_FIRST,
    ITEM_ROW,
    ITEM_TOKENS,
    ITEMS,
    ROW,
    USED_KEYS,
    USED_QUERIES,
    prefers_fused,
)
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, takes_quads


class WorkItem(NamedTuple):
    """The unit of work of a thread block: own rows of a head, at most 64 per compute warpgroup.

    All fields but the last are integers.
    """

    batch: Any
    head: Any
    tile: Any  # its number in the head; of a listed item, in the list of all batch entries
    number: Any  # how many items this block processed before
    streamed: Any  # how many tiles streamed for those items
    first: Any = 0  # the first tile that streams past this item
    steps: Any = 0  # how many tiles stream past this item
    uncompared: Any = 0  # how many of the first of these need no comparison: all their rows have the own rows' id
    row: Any = 0  # the first row of the first of these, unless a tile holds chunks of several segments
    last: Any = 0  # if an item keeps to a segment: how many rows of the last of these are the segment's
    chunk: Any = 0  # the first of its chunks of own rows
    chunks: Any = 0  # how many it has, one per warpgroup at most
    record: Any = None  # if it is listed: a reference to its record


class AssignedItems(NamedTuple):
    """The work items that a thread block processes, one after the other."""

    count: Any
    place_of: Callable  # place_of(number): an item's batch, head and tile; the batch is 0 where only a record has it


class Side(NamedTuple):
    """The queries or the keys of a call; with ids, references to what `token_ids` returns for them."""

    tokens: int
    ids: Any = None
    chunks: Any = None
    are_moved: bool = False  # chunks start where segments start
    used: Any = None  # how many of the chunks of a batch entry are used, or how many work items are listed in all
    counts: Any = None  # all counts, if the fused backward kernel may process the chunks instead

    def row(self, batch, place):
        """Return the row that has a place, a multiple of 64, in the order of ids and vectors."""
        return self.chunks[batch, lax.div(jnp.int32(place), ROWS), ROW] if self.are_moved else place

    def count(self, batch, place):
        """Return how many of the rows from a place on are those of its chunk; the others must not be stored."""
        return ROWS if self.chunks is None else self.chunks[batch, lax.div(place, ROWS), COUNT]


class WorkItems(tiles.HopperKernel):
    """A kernel whose persistent thread blocks process the work items of a Schedule."""

    def sides(self, ids: tuple) -> tuple[Side, Side]:
        """Return queries and keys, given a kernel's ids: those of `token_ids`, or none."""
        if not ids:
            return Side(self.queries), Side(self.keys)
        q_ids, k_ids, q_chunks, k_chunks, used = ids
        of_queries, of_keys = (ITEMS, ITEMS) if self.schedule.is_listed else (USED_QUERIES, USED_KEYS)
        are_moved = tiles.has_packed_segments(self.queries, self.chunks)
        queries = Side(self.queries, q_ids, q_chunks, are_moved, used.at[of_queries])
        return queries, Side(self.keys, k_ids, k_chunks, are_moved, used.at[of_keys])

    @property
    def keeps_to_segments(self) -> bool:
        """Return whether all of an item's rows are those of one packed segment: with quads, which hold the short ones.

        Ring kernels then need listed work items; the fused kernel draws its own. A batch entry whose chunks were not
        moved counts as one segment.
        """
        return tiles.has_packed_segments(self.queries, self.chunks) and takes_quads(self.head_dim)

    @property
    def copies_chunks(self) -> bool:
        """Return whether chunks are copied one by one, because a streamed tile may hold those of two segments."""
        return tiles.has_packed_segments(self.queries, self.chunks) and not self.keeps_to_segments

    def tiles(self, own_rows: int) -> int:
        """Return the number of work items per head, without chunks that start where segments start."""
        return pl.cdiv(own_rows, ROWS * self.schedule.warpgroups)

    def work_items(self, own_rows: int) -> int:
        return self.batch * self.heads * self.tiles(own_rows)

    def divided(self, index, own_rows: int) -> tuple:
        """Return batch, head and tile of the item with this index."""
        head, tile = lax.div(index, self.tiles(own_rows)), lax.rem(index, self.tiles(own_rows))
        return lax.div(head, self.heads), lax.rem(head, self.heads), tile

    def _divided(self, index, tiles) -> tuple:
        """Return batch, head and tile of an item, of which each head has `tiles`; heads come first.

        Some of these may be empty, at the end of a batch entry.
        """
        entry, head = lax.div(index, self.heads), lax.rem(index, self.heads)
        return lax.div(entry, tiles), head, lax.rem(entry, tiles)

    def blocks(self, own_rows: int) -> int:
        items = self.work_items(own_rows)
        if tiles.has_packed_segments(self.queries, self.chunks):  # the device knows how many
            items = self.batch * self.heads * self.chunks[0]
        return min(self.multiprocessors, items)

    def assigned_items(self, side: Side) -> AssignedItems:
        """Return the items that this block processes.

        The items of a head run concurrently on different blocks, so that they share its tiles in the L2 cache. The
        assignment rotates, so that each block gets both early and late items of a head.
        """
        blocks, heads = self.blocks(side.tokens), self.heads
        items, divided = self.work_items(side.tokens), lambda index: self.divided(index, side.tokens)
        if side.used is not None:
            used = side.used[...] if side.counts is None else jnp.where(prefers_fused(side.counts), 0, side.used[...])
            if self.schedule.is_listed:
                # An item's batch entry is known from its record.
                items, divided = heads * used, lambda index: (0, lax.rem(index, heads), lax.div(index, heads))
            else:
                per_head = lax.div(used + self.schedule.warpgroups - 1, self.schedule.warpgroups)
                items, divided = self.batch * heads * per_head, lambda index: self._divided(index, per_head)
        share = lax.div(jnp.int32(items), blocks)

        def index_of(number):
            return number * blocks + lax.rem(lax.axis_index("block") + number, blocks)

        count = share + (index_of(share) < items).astype(jnp.int32)
        return AssignedItems(count, lambda number: divided(index_of(number)))

    def for_each_assigned_item(self, assigned: AssignedItems, side: Side, with_span, process, scratch: dict) -> tuple:
        """Call process(item) for all assigned items; return their number and that of the streamed tiles."""

        def body(number, streamed):
            item = WorkItem(*assigned.place_of(number), number, streamed)
            if self.schedule.is_listed:
                item = item._replace(record=self._arrived_record(number, scratch))
            item = with_span(self._with_chunks(item, side))
            process(item)
            return streamed + item.steps

        return assigned.count, lax.fori_loop(0, assigned.count, body, jnp.int32(0))

    # --- records of listed items --------------------------------------------------------------------------------------

    @property
    def _records(self) -> int:
        """Return how many records shared memory holds: of the items in the buffers, and of the next one."""
        return self.schedule.buffers + 1

    def record_scratch(self) -> dict:
        """Return scratch in which the loader passes records on.

        Otherwise, each warpgroup would wait for device memory between two items.
        """
        if not self.schedule.is_listed:
            return {}
        return {
            "record_smem": plgpu.SMEM((self._records, FIELDS), jnp.int32),
            "record_arrived": plgpu.Barrier(num_barriers=self._records),
        }

    def request_record(self, number, assigned: AssignedItems, side: Side, scratch: dict) -> None:
        """Request the record of the listed item with this number, if there is one.

        The compute warpgroups must have given back the rows of the item that had its place in shared memory.
        """
        if not self.schedule.is_listed:
            return

        @pl.when(number < assigned.count)
        def _():
            _, _, index = assigned.place_of(number)  # in the list of all batch entries
            record = side.chunks.at[lax.div(index, self.chunks[0]), lax.rem(index, self.chunks[0])]
            smem, arrived = (
                scratch[name].at[lax.rem(number, self._records)] for name in ("record_smem", "record_arrived")
            )
            plgpu.copy_gmem_to_smem(record, smem, arrived)

    def _arrived_record(self, number, scratch: dict):
        """Wait for the record of the listed item with this number; each warpgroup must do so for each item."""
        slot = lax.rem(number, self._records)
        plgpu.barrier_wait(scratch["record_arrived"].at[slot])
        return scratch["record_smem"].at[slot]

    # --- an item's rows and tiles -------------------------------------------------------------------------------------

    def heads_of(self, item: WorkItem) -> tuple:
        """Return the indices of the item's head in q, k and v."""
        return tuple(item.head + first for first in self.first_heads)

    def tile_of_rows(self, item: WorkItem):
        """Return the number of an item's block of own rows in its head."""
        return item.tile

    def _with_chunks(self, item: WorkItem, side: Side) -> WorkItem:
        """Return the item with its chunks of own rows, and with its batch entry.

        Without ids, the chunks of a head are divided evenly: 10 are 2 + 3 + 2 + 3, not 3 + 3 + 3 + 1. That takes up to
        2.5 % less time in the backward kernels on an H200.
        """
        if self.schedule.is_listed:
            batch, chunk, chunks = (item.record[field] for field in (ITEM_ENTRY, ITEM, ITEM_CHUNKS))
            return item._replace(batch=batch, chunk=chunk, chunks=chunks)
        tile, warpgroups = self.tile_of_rows(item), self.schedule.warpgroups
        if side.chunks is not None:
            return item._replace(chunk=tile * warpgroups, chunks=warpgroups)
        chunks = pl.cdiv(side.tokens, ROWS)
        items = pl.cdiv(chunks, warpgroups)
        first, end = (lax.div(i * chunks, items) for i in (tile, tile + 1))
        return item._replace(chunk=first, chunks=end - first)

    def with_span(self, item: WorkItem, own: Side, streamed: Side) -> WorkItem:
        """Return the item with the tiles that stream past it."""
        if own.chunks is None:
            return item._replace(steps=pl.cdiv(streamed.tokens, self.schedule.tile))
        if self.keeps_to_segments:
            return self._with_segment(item)
        first, steps, uncompared = self._span_of(item, own)
        return item._replace(first=first, steps=steps, uncompared=uncompared, row=first * self.schedule.tile)

    def _with_segment(self, item: WorkItem) -> WorkItem:
        """Return the item with the tiles of its segment."""
        assert self.schedule.is_listed
        first, steps, uncompared = self._listed_span(item)
        last = item.record[ITEM_TOKENS] - (steps - 1) * self.schedule.tile
        return item._replace(first=first, steps=steps, uncompared=uncompared, row=item.record[ITEM_ROW], last=last)

    def _span_of(self, item: WorkItem, own: Side) -> tuple:
        """Return the first of the tiles that an item's chunks need, their number, and how many need no comparison."""
        if self.schedule.is_listed:
            return self._listed_span(item)
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

    def _listed_span(self, item: WorkItem) -> tuple:
        return self._tiles_of(*(item.record[field] for field in (ITEM_FIRST, ITEM_END, ITEM_COMPARED)))

    def _tiles_of(self, first, end, limit) -> tuple:
        """Return _span_of for the chunks from first to end, which must be compared from `limit` on."""
        per_tile = self.schedule.tile // ROWS
        first_tile = lax.div(first, per_tile)
        steps = lax.max(lax.div(end + per_tile - 1, per_tile) - first_tile, 0)
        uncompared = jnp.where(lax.rem(first, per_tile) == 0, lax.div(limit, per_tile) - first_tile, 0)
        return first_tile, steps, lax.clamp(0, uncompared, steps)

    def first_row(self, item: WorkItem, warpgroup):
        """Return the first of a warpgroup's own rows; with ids, its place (see Side.row)."""
        if self.schedule.is_listed:
            # A warpgroup without rows gets those of another one, lest it read beyond the chunks.
            warpgroup = lax.min(warpgroup, item.chunks - 1)
        return (item.chunk + warpgroup) * ROWS

    def own_row(self, item: WorkItem, side: Side, place):
        """Return the row that has a place, a multiple of 64, among the item's own rows; see Side.row."""
        if self.keeps_to_segments:
            return item.row + self._place_in_segment(item, place)
        return side.row(item.batch, place)

    def own_count(self, item: WorkItem, side: Side, place):
        """Return how many of the rows from a place on are those of its chunk; see Side.count."""
        if self.keeps_to_segments:
            tokens = item.last + (item.steps - 1) * self.schedule.tile
            return lax.clamp(0, tokens - self._place_in_segment(item, place), ROWS)
        return side.count(item.batch, place)

    def _place_in_segment(self, item: WorkItem, place):
        return place - item.first * self.schedule.tile

    def has_rows(self, own: Side, item: WorkItem, warpgroup):
        has_chunk = warpgroup < item.chunks
        if own.chunks is None:
            return has_chunk
        return has_chunk & (self.own_count(item, own, self.first_row(item, warpgroup)) > 0)
