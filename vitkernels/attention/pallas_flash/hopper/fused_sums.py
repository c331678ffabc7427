"""The float32 sums of dq in device memory, in the fused backward kernel of `pallas_flash` on Hopper.

The compute warpgroups write dq of a tile of queries to shared memory, and a warpgroup with few registers adds it to the
sums, in the order of fused_order.py. A sequence's last item needs no addition: the same warpgroup loads the other
items' sums, the compute warpgroups add them to their product, and it stores the total as dq.

A tile has two halves of 64 queries, one per compute warpgroup. Shared memory holds one tile's sums. Four barriers guard
them. sum_free: a half may be written, or holds sums to read. sum_ready: a half of dq may be added, or its total stored.
sum_arrived: sums have been loaded. sum_read: loaded sums have been read; used only for an early hand-over, since
sum_ready implies it otherwise.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.fused_order import TILE, KeyBlock, OrderedKernel
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS

HALVES = TILE // ROWS  # of a tile: chunks of 64 queries
_GROUPS = ROWS // groups.COLUMNS, 2, ROWS * groups.COLUMNS // 2  # the TMA unit's boxes have rows of 256 at most
_FEW_TILES = 24  # of a sequence: an early hand-over is faster at 18 tiles and slower at 32 (H200)


class SummingKernel(OrderedKernel):
    """An ordered kernel with a warpgroup that adds dq to sums in device memory.

    Totals pass through the buffers of dS. There are two, which tiles use in turns.
    """

    @property
    def sums(self) -> jax.ShapeDtypeStruct:
        """Return dq in float32: of each tile of a head, its halves in groups; see groups.py."""
        tiles_of_queries = self.batch * self.heads * self.query_tiles
        return jax.ShapeDtypeStruct((tiles_of_queries, HALVES, *_GROUPS), jnp.float32)

    @property
    def _hands_over_early(self) -> bool:
        """Return whether an item ends its turns, and requests the other items' sums, as early as it can.

        On an H200 that takes 2 to 5 % less time at 577 to 2304 tokens, and 1 to 8 % more at 4096. With segments, whose
        lengths only the device knows, it always does.
        """
        return self.has_ids or self.query_tiles <= _FEW_TILES

    def sums_scratch(self) -> dict:
        by_half = plgpu.Barrier(num_arrivals=1, num_barriers=HALVES)
        of_tile = plgpu.Barrier(num_arrivals=HALVES)
        return {
            "sum_smem": plgpu.SMEM((HALVES, *_GROUPS), jnp.float32),
            "sum_free": by_half,
            "sum_ready": by_half,
            "sum_read": of_tile,
            "sum_arrived": of_tile,
        }

    def ds_index(self, buffer, warpgroup, half):
        """Return the index of 64 × 64 of dS in shared memory: a warpgroup's keys by half of a tile's queries."""
        return (buffer * self.schedule.warpgroups + warpgroup) * HALVES + half

    def _index_of_total(self, item: KeyBlock, tile, half):
        """Return where in the buffers of dS a total lies: where only this half's product has read the tile's dS."""
        return self.ds_index(buffer_of(item.streamed + tile), 0, half)

    def store_rows_of(self, count, store_all, store_first):
        """Store 64 rows: all of them, or only the first ones if they reach past a segment's end.

        count: how many are the sequence's own.
        """
        if not self.has_ids:  # rows past the last token are not written
            store_all()
            return
        pl.when(count == ROWS)(store_all)
        pl.when((count > 0) & (count < ROWS))(store_first)

    # --- the compute warpgroups ---------------------------------------------------------------------------------------

    def write_dq(self, place, dq, half, scratch):
        """Write half of a tile's dq, to be added to the sums. place: of the tile; its dS is no longer needed."""
        plgpu.barrier_wait(scratch["sum_free"].at[half])
        plgpu.barrier_arrive(scratch["ds_consumed"].at[buffer_of(place)])
        groups.store(scratch["sum_smem"].at[half], dq, self.interpret)

    def total_of(self, dq, half, scratch):
        """Return half of a tile's dq, with the other items' sums; store the total, then call release_sums."""
        plgpu.barrier_wait(scratch["sum_free"].at[half])
        return (dq + groups.load(scratch["sum_smem"].at[half], self.interpret)) * self.scale

    def write_total(self, total, item: KeyBlock, tile, half, scratch):
        """Write half of a tile's total, to be stored as dq."""
        (smem,) = tiles.at(scratch["ds_smem"], self._index_of_total(item, tile, half))
        smem[...] = total.astype(self.dtype)

    def release_sums(self, scratch):
        """Let the next tile's sums be loaded.

        The total has been stored, so the loads of this tile's sums have completed. After a sequence's last tile, of
        which some rows may not be stored, no sums are loaded.
        """
        if self._hands_over_early:
            plgpu.barrier_arrive(scratch["sum_read"])

    def publish_dq(self, half, scratch):
        """Pass on what write_dq or write_total wrote."""
        tiles.fence_shared_memory(self.interpret)
        plgpu.barrier_arrive(scratch["sum_ready"].at[half])

    # --- the warpgroup that adds --------------------------------------------------------------------------------------

    def add_to_sums(self, item: KeyBlock, refs, scratch):
        """Add dq of an item to the sums, tile by tile; of a sequence's last item, store the totals."""
        is_last = self.is_last(item)

        @pl.loop(0, item.steps)
        def _(tile):
            pl.when(~is_last)(lambda: self._add_tile(item, tile, refs, scratch))
            pl.when(is_last)(lambda: self._complete_tile(item, tile, refs, scratch))

        pl.when(~is_last)(lambda: self.end_turn(item, item.steps - 1, refs["counters"]))

    def _add_tile(self, item, tile, refs, scratch):
        def end_turn_before(copies_since=0):
            pl.when(tile > 0)(lambda: self.end_turn(item, tile - 1, refs["counters"], copies_since))

        _offer(scratch)
        if self._hands_over_early:
            end_turn_before()
        self.wait_for_turn(item, tile, refs["counters"])
        for half in range(HALVES):
            plgpu.barrier_wait(scratch["sum_ready"].at[half])
            self._add_half(item, scratch["sum_smem"].at[half], self._sums_of(item, tile, refs).at[half])
        if not self._hands_over_early:  # only now: its additions have had a tile's time to arrive
            end_turn_before(copies_since=HALVES)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _add_half(self, item, smem, sums):
        """Start adding half of a tile's dq to its sums; the sequence's first item stores it."""
        if self.interpret:
            sums[...] = jnp.where(item.turn == 0, smem[...], smem[...] + sums[...])
            return
        pl.when(item.turn == 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums))
        pl.when(item.turn > 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums, reduction_op="add"))

    def _complete_tile(self, item, tile, refs, scratch):
        load = partial(self._load_sums, item, refs=refs, scratch=scratch)
        if self._hands_over_early:
            pl.when(tile == 0)(lambda: load(tile))
        else:
            load(tile)
        plgpu.barrier_wait(scratch["sum_arrived"])
        _offer(scratch)
        if self._hands_over_early:
            plgpu.barrier_wait(scratch["sum_read"])
            pl.when(tile < item.steps - 1)(lambda: load(tile + 1))
        for half in range(HALVES):
            plgpu.barrier_wait(scratch["sum_ready"].at[half])
            self._store_half(item, tile, half, refs, scratch)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for _ in range(self.schedule.warpgroups):  # for both, whose halves were stored from the buffer
            plgpu.barrier_arrive(scratch["ds_consumed"].at[buffer_of(item.streamed + tile)])

    def _load_sums(self, item, tile, refs, scratch):
        """Start loading the other items' sums of a tile, once all of these have been added."""
        self.wait_for_turn(item, tile, refs["counters"])
        for half in range(HALVES):
            smem, sums = scratch["sum_smem"].at[half], self._sums_of(item, tile, refs).at[half]
            if self.interpret:
                smem[...] = sums[...]
                plgpu.barrier_arrive(scratch["sum_arrived"])
            else:
                plgpu.copy_gmem_to_smem(sums, smem, scratch["sum_arrived"])

    def _store_half(self, item, tile, half, refs, scratch):
        """Start storing half of a tile's total, unless its first rows were stored from registers."""
        q_head, *_ = self.heads_of(item)
        index, row = self._index_of_total(item, tile, half), item.row + tile * TILE + half * ROWS

        def store():
            tiles.store_rows(scratch["ds_smem"], index, refs["dq"], item.batch, row, q_head, self.interpret)

        self.store_rows_of(self.rows_of(item, tile * TILE + half * ROWS), store, lambda: None)

    def _sums_of(self, item, tile, refs):
        first = (item.batch * self.heads + item.head) * self.query_tiles + lax.div(item.first, HALVES)
        return refs["sums"].at[first + tile]


def buffer_of(place):
    """Return which buffer of dS holds that of the tile with this place: tiles streamed before it."""
    return lax.rem(place, 2)


def _offer(scratch):
    for half in range(HALVES):
        plgpu.barrier_arrive(scratch["sum_free"].at[half])
