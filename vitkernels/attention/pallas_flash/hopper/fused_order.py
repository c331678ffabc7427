"""The order of the fused backward kernel of `pallas_flash` on Hopper: of its work items, and of additions to dq.

A work item is a block of 128 keys of a head's sequence: of all its tokens, or of a packed segment. Each item adds its
part of dq to float32 sums in device memory. Results are bit-equal from run to run, because the items of a sequence add
to a tile of queries in ascending order of their keys: a counter per tile says whose turn it is.

An item only ever waits for items with lower numbers, and thread blocks draw items in ascending order, when they run. So
the unfinished item with the lowest number never waits, whichever blocks run at a time: the kernel cannot deadlock.
A block multiplies the last dq of an item in the first step of its next item, and passes it on in the second; before
that, it waits for no turn of the next item.

Only the device knows how long the segments are. So both this kernel and the pair are launched for them, and counts of
chunks tell which one has work: this one if most of the work is in long segments.

Shape suffixes: B batch, H heads, N query tokens, D head dim.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.chunks import (
    COUNT,
    END,
    FIELDS,
    FIRST,
    LONG_CHUNKS,
    LONG_SURPLUS,
    ROW,
    SEGMENT_TOKENS,
    USED_KEYS,
    USED_QUERIES,
    prefers_fused,
)
from vitkernels.attention.pallas_flash.hopper.ring import RingKernel
from vitkernels.attention.pallas_flash.hopper.schedule import APART, interleaved_heads
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, at, filled, row_sums

TILE = 2 * ROWS  # queries that stream past an item at once, and of which it adds dq in one turn
_KEYS = 2 * ROWS  # of a work item
_STARTS_BLOCKS = 6  # thread blocks of Starts that a multiprocessor runs at a time
_TICKETS = 2  # the most items that a block has drawn and not yet finished with
_COUNTER = 8  # integers: the least that a slice of an array holds
# A ticket has the item's index behind room for a record. With ids, that is the record of the item's first chunk, and
# the item's batch entry, head and block of keys follow the index.
_INDEX = FIELDS
_BATCH, _HEAD, _BLOCK = range(_INDEX + 1, _INDEX + 4)
# The counters of turns are at multiples of TILE in each head's row, that of drawn items between two of the first.
_DRAWN = ROWS


class KeyBlock(NamedTuple):
    """A work item: 128 keys of a sequence, which is a head, or a packed segment of it.

    All fields but the ticket are integers.
    """

    batch: Any
    head: Any
    turn: Any  # how many items of the sequence add to dq before this one
    number: Any  # how many items this block processed before
    streamed: Any  # how many tiles streamed for those items
    first: Any  # the sequence's first chunk of 64 queries, in the order of log-sum-exp; an even number
    steps: Any  # its number of tiles of queries
    row: Any  # its first row
    tokens: Any  # its number of rows
    ticket: Any = None  # in shared memory, with ids

    @property
    def place(self):
        """Return the first of these keys, counted from the sequence's first."""
        return self.turn * _KEYS


class Starts(tiles.HopperKernel):
    """The kernel before the fused one: computes what the products of S and dP start from, and zeroes the counters."""

    def __call__(self, out_BNHD, do_BNHD, lse_BHN, *ids):
        """Return -lse in units of q k, -delta = -rowsum(dO O), and zeros in int32, all like log-sum-exp.

        ids: what `token_ids` returns for packed segments.
        """
        dtype = jnp.dtype(self.dtype)
        counters = jax.ShapeDtypeStruct(self.vector().shape, jnp.int32)
        scratch = {
            "out_smem": tiles.tile(ROWS, self.head_dim, dtype, 1),
            "do_smem": tiles.tile(ROWS, self.head_dim, dtype, 1),
            "arrived": plgpu.Barrier(num_arrivals=2 * self.copies),
        }
        grid = {"block": self._blocks}
        kernel = self.launch(self._body, grid, 1, (self.vector(), self.vector(), counters), scratch)
        return kernel(out_BNHD, do_BNHD, lse_BHN, *ids)

    @property
    def _blocks(self) -> int:
        most = self.batch * self.heads * self.padded_queries // ROWS
        return min(most, _STARTS_BLOCKS * self.multiprocessors)

    def _body(self, out_ref, do_ref, lse_ref, *refs, **scratch):
        _, ids, (of_scores_ref, of_dp_ref, counters_ref) = self.extras(refs)
        tiles_of_head = pl.cdiv(self.queries, ROWS)
        if ids:
            _, _, chunks, _, counts = ids
            tiles_of_head = jnp.where(prefers_fused(counts), counts[USED_QUERIES], 0)

        @pl.loop(lax.axis_index("block"), tiles_of_head * self.heads * self.batch, step=self._blocks)
        def _(index):
            head, tile = lax.div(index, tiles_of_head), lax.rem(index, tiles_of_head)
            batch, head = lax.div(head, self.heads), lax.rem(head, self.heads)
            for ref, name in ((out_ref, "out_smem"), (do_ref, "do_smem")):
                row, smem = chunks[batch, tile, ROW] if ids else tile * ROWS, scratch[name]
                tiles.load_rows(ref, batch, row, head, smem, 0, scratch["arrived"], self.interpret)
            rows = pl.ds(tile * ROWS, ROWS)
            counters_ref.at[batch, head, rows][...] = filled((ROWS,), 0, tiles.BY_ROW, jnp.int32)
            lse = self._load(lse_ref.at[batch, head, rows])
            of_scores_ref.at[batch, head, rows][...] = lse * (-1 / self.log2_scale)
            plgpu.barrier_wait(scratch["arrived"])
            pairs = zip(at(scratch["out_smem"], 0), at(scratch["do_smem"], 0), strict=True)
            delta = sum(row_sums(x, y) for x, y in pairs)
            if ids:  # rows past a segment's end have weights of 0, and 0 times the next segment's delta may be NaN
                delta = jnp.where(tiles.row_numbers() < chunks[batch, tile, COUNT], delta, 0.0)
            of_dp_ref.at[batch, head, rows][...] = -delta

    def _load(self, rows_ref):
        return rows_ref[...] if self.interpret else plgpu.load(rows_ref, layout=tiles.BY_ROW, optimized=False)


class OrderedKernel(RingKernel):
    """A ring kernel whose thread blocks draw work items, and whose items of a sequence take turns.

    Work items are as many keys as the compute warpgroups own; all of the sequence's queries stream past each.
    """

    @property
    def query_tiles(self) -> int:
        """Return the most tiles of queries of a head; segments of more than 256 tokens take at most 3 per 256."""
        return pl.cdiv(self.queries if self.chunks is None else pl.cdiv(3 * self.queries, 2), TILE)

    @property
    def counters(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.vector().shape, jnp.int32)

    # --- work items ---------------------------------------------------------------------------------------------------

    def key_blocks(self, ids: tuple):
        """Return how many items each head has; of packed segments, the batch entry with the most."""
        return lax.div(ids[4][USED_KEYS] + 1, 2) if ids else self.tiles(self.keys)

    def groups_of_heads(self, ids: tuple):
        """Return into how many groups the heads are divided, as evenly as possible. The heads of a group alternate.

        A group has about as many heads as keep a sequence's items apart. With fewer, items would wait for their turns.
        With more, the rows and sums of the group would not fit in the L2 cache.
        """
        heads = self.batch * self.heads
        if not ids:
            return pl.cdiv(heads, interleaved_heads(heads, self.queries, self.multiprocessors))
        # The surplus is the sum of the long segments' squared lengths, in chunks, less that of shorter ones. Divided by
        # the number of the long segments' chunks, it is at most the mean length of such a chunk's segment.
        counts = ids[4]
        surplus = lax.max(counts[LONG_SURPLUS], 1)
        fewest = lax.div(2 * APART * self.multiprocessors * counts[LONG_CHUNKS] + surplus - 1, surplus)
        fewest = lax.max(fewest, 1)
        return lax.max(lax.div(2 * heads + fewest, 2 * fewest), 1)  # heads / fewest, rounded to the nearest

    def place_of(self, index, ids: tuple) -> tuple:
        """Return the batch entry, head and block of keys of the item with this index.

        Blocks of keys come in ascending order, of several heads in alternation. So an item starts when the item before
        it in its sequence is some turns ahead, and rarely waits.
        """
        heads, key_blocks, groups = self.batch * self.heads, self.key_blocks(ids), self.groups_of_heads(ids)
        # Group i has the heads from i * heads / groups, rounded down, to the next group's first.
        group = lax.div((lax.div(index, key_blocks) + 1) * groups - 1, heads)
        first, end = (lax.div(i * heads, groups) for i in (group, group + 1))
        rest = index - first * key_blocks
        head, block = first + lax.rem(rest, end - first), lax.div(rest, end - first)
        return lax.div(head, self.heads), lax.rem(head, self.heads), block

    def item(self, index, number, streamed, ids: tuple, ticket) -> KeyBlock:
        """Return the work item with this index. ticket: the one that the loader drew for it."""
        if not ids:
            batch, head, block = self.place_of(index, ids)
            return KeyBlock(batch, head, block, number, streamed, 0, self.query_tiles, 0, self.keys)
        return self._read(ticket, number, streamed)

    def _read(self, ticket, number, streamed) -> KeyBlock:
        """Return the work item of a ticket."""
        batch, head, block = (ticket[field] for field in (_BATCH, _HEAD, _BLOCK))
        first, end, row, tokens = (ticket[field] for field in (FIRST, END, ROW, SEGMENT_TOKENS))
        turn = block - lax.div(first, 2)
        steps = lax.div(lax.max(end - first, 0) + 1, TILE // ROWS)
        return KeyBlock(batch, head, turn, number, streamed, first, steps, row - turn * _KEYS, tokens, ticket)

    def reread(self, item: KeyBlock) -> KeyBlock:
        """Return the item; with ids, read anew from its ticket.

        A loop that needs all registers would spill it to local memory, and loads from there take hundreds of cycles.
        """
        return self._read(item.ticket, item.number, item.streamed) if self.has_ids else item

    def is_last(self, item: KeyBlock):
        """Return whether this is the last item of its sequence."""
        return item.place + _KEYS >= item.tokens

    def first_row(self, item, warpgroup):
        """Return the first of a warpgroup's own rows. item: a KeyBlock."""
        return item.row + item.place + warpgroup * ROWS

    def rows_of(self, item: KeyBlock, place):
        """Return how many of the 64 rows from a place in the sequence on belong to it."""
        return lax.clamp(0, item.tokens - place, ROWS)

    def for_each_item(self, take, release, process, ids: tuple, scratch: dict, close=None):
        """Call process(item, is_open) for the items that take(number) returns.

        Stop at the first index past the last item. Return that ticket's number, how many items were processed, how many
        tiles streamed for them, and is_open of a next item.

        is_open: whether the block's previous item was not its sequence's last: dq of its last tile is left to the next.
        release(number) is called when what was taken is no longer needed.

        A batch entry with fewer chunks than another one has empty items, which are not processed. If one follows an
        open item, close(items, streamed) is called: were dq left to a later item, the loader could not draw that, as it
        draws at most two ahead of what the warpgroup that adds dq has finished.
        """
        count = self.batch * self.heads * self.key_blocks(ids)

        def body(carry):
            taken, number, streamed, is_open, index = carry
            item = self.item(index, number, streamed, ids, scratch["ticket_smem"].at[lax.rem(taken, _TICKETS)])
            if ids:
                has_work = item.steps > 0
                pl.when(has_work)(lambda: process(item, is_open))
                if close:
                    pl.when(~has_work & is_open)(lambda: close(number, streamed))
                number += has_work.astype(jnp.int32)
                is_open = has_work & ~self.is_last(item)
            else:
                process(item, is_open)
                number += 1
                is_open = ~self.is_last(item)
            release(taken)  # not before: reads of the record could still be under way
            return taken + 1, number, streamed + item.steps, is_open, take(taken + 1)

        zero = jnp.int32(0)
        first = zero, zero, zero, jnp.bool_(False), take(zero)
        taken, number, streamed, is_open, _ = lax.while_loop(lambda carry: carry[4] < count, body, first)
        release(taken)
        return taken, number, streamed, is_open

    def tickets(self, readers: int) -> dict:
        """Return scratch in which the loader passes the items that it draws to other warpgroups."""
        return {
            # Copies of records need addresses at multiples of 128 bytes.
            "ticket_smem": plgpu.SMEM((_TICKETS, 2 * FIELDS), jnp.int32),
            "ticket_ready": plgpu.Barrier(num_arrivals=1 + self.has_ids, num_barriers=_TICKETS),
            "ticket_read": plgpu.Barrier(num_arrivals=readers, num_barriers=_TICKETS),
        }

    def draw(self, number, counters_ref, ids: tuple, scratch):
        """Draw the next item for this block; return its index, and pass it to the other warpgroups.

        With ids, the ticket also has the record of the item's first chunk, and the item's place.
        """
        slot = lax.rem(number, _TICKETS)
        ready = scratch["ticket_ready"].at[slot]
        pl.when(number >= _TICKETS)(lambda: plgpu.barrier_wait(scratch["ticket_read"].at[slot]))
        if self.interpret:  # one block processes all items
            scratch["ticket_smem"][slot, _INDEX] = number
        else:
            index = scratch["ticket_smem"].at[slot, pl.ds(_INDEX, _COUNTER)]
            _increment(counters_ref.at[0, 0, pl.ds(_DRAWN, _COUNTER)], index)
        index = scratch["ticket_smem"][slot, _INDEX]
        if ids:
            exists = index < self.batch * self.heads * self.key_blocks(ids)

            @pl.when(exists)
            def _():
                batch, head, block = self.place_of(index, ids)
                _store_integers((batch, head, block), scratch["ticket_smem"].at[slot, pl.ds(_BATCH, 3)], self.interpret)
                record = scratch["ticket_smem"].at[slot, pl.ds(0, FIELDS)]
                plgpu.copy_gmem_to_smem(ids[2].at[batch, 2 * block], record, ready)

            pl.when(~exists)(lambda: plgpu.barrier_arrive(ready))
        plgpu.barrier_arrive(ready)
        if ids:
            plgpu.barrier_wait(ready)
        return index

    def drawn(self, number, scratch):
        """Return the index of the item that the loader drew; give_ticket_back must follow."""
        slot = lax.rem(number, _TICKETS)
        plgpu.barrier_wait(scratch["ticket_ready"].at[slot])
        return scratch["ticket_smem"][slot, _INDEX]

    def give_ticket_back(self, number, scratch):
        plgpu.barrier_arrive(scratch["ticket_read"].at[lax.rem(number, _TICKETS)])

    def finish_tickets(self, taken, scratch):
        """Wait for the last phases of ticket_read, as every phase must be; one more ticket was drawn."""
        for i in range(_TICKETS):
            number = taken + 1 - _TICKETS + i
            wait = scratch["ticket_read"].at[lax.rem(number + _TICKETS, _TICKETS)]
            pl.when(number >= 0)(lambda wait=wait: plgpu.barrier_wait(wait))

    # --- turns --------------------------------------------------------------------------------------------------------

    def _turns(self, item: KeyBlock, tile, counters_ref):
        """Return the counter of items that have added to a tile."""
        return counters_ref.at[item.batch, item.head, pl.ds(item.first * ROWS + tile * TILE, _COUNTER)]

    def wait_for_turn(self, item: KeyBlock, tile, counters_ref):
        """Wait until all items before this one in its sequence have added to a tile."""
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def wait(_ctx, ref, turn):
            semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref))
            semaphore.wait(turn.registers.item(), decrement=False, memory_scope="gpu")
            # The additions that follow are the TMA unit's, in the async proxy.
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

        wait(self._turns(item, tile, counters_ref), item.turn)

    def end_turn(self, item: KeyBlock, tile, counters_ref, copies_since: int = 0):
        """Wait until this item's additions to a tile have arrived, and count its turn.

        copies_since: how many copies were started after those additions.
        """
        plgpu.wait_smem_to_gmem(copies_since)
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def signal(_ctx, ref):
            mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

        signal(self._turns(item, tile, counters_ref))


def _store_integers(values: tuple, ref, interpret: bool) -> None:
    """Store integers, the same in all threads of a warpgroup, to consecutive places in shared memory."""
    if interpret:  # the interpreter does not run Mosaic GPU code
        for i, value in enumerate(values):
            ref[i] = value
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(plgpu.Layout.WG_SPLAT(()) for _ in values)))
    def store(_ctx, ref, *values):
        utils = mgpu.utils
        with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
            for i, value in enumerate(values):
                utils.memref.store(value.registers.item(), ref, [utils.c(i, utils.ir.IndexType.get())])
        utils.warpgroup_barrier()

    store(ref, *(jnp.int32(x) for x in values))


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
def _increment(_ctx, counter, previous):
    """Increment a counter in device memory; store its previous value in shared memory."""
    utils = mgpu.utils
    i32 = utils.ir.IntegerType.get_signless(32)
    with utils.single_thread(scope=utils.ThreadSubset.WARPGROUP):
        value = utils.inline_ptx(
            "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;",
            utils.memref_ptr(counter),
            result_types=i32,
            has_side_effects=True,
        )
        utils.memref.store(value, previous, [utils.c(0, utils.ir.IndexType.get())])
    utils.warpgroup_barrier()
