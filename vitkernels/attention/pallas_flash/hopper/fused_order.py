"""The order of the fused backward kernel of `pallas_flash` on Hopper: of its work items, and of additions to dq.

A work item is a head's block of 128 keys. Each item adds its part of dq to float32 sums in device memory. Results are
bit-equal from run to run, because the items of a head add to a tile of queries in ascending order of their keys: a
counter per group of tiles says whose turn it is.

An item only ever waits for items with lower numbers, and thread blocks draw items in ascending order, when they run. So
the unfinished item with the lowest number never waits, whichever blocks run at a time: the kernel cannot deadlock.

Shape suffixes: B batch, H heads, N query tokens, D head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.ring import RingKernel, WorkItem
from vitkernels.attention.pallas_flash.hopper.schedule import interleaved_heads
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, at, filled, row_sums

TURN = 2  # tiles of queries that an item adds to in one turn
_TURN_ROWS = TURN * ROWS
_TICKETS = 2  # buffers for the indices of items that a block has drawn
_COUNTER = 8  # integers: the least that a slice of an array holds
# The counters of turns are at multiples of _TURN_ROWS in each head's row, that of drawn items between two of the first.
_DRAWN = ROWS


class Delta(tiles.HopperKernel):
    """The kernel that computes delta = rowsum(dO O), and zeroes the counters of the fused kernel."""

    def __call__(self, out_BNHD, do_BNHD):
        """Return delta and zeros in int32, both (B, H, padded N)."""
        dtype = jnp.dtype(self.dtype)
        counters = jax.ShapeDtypeStruct(self.vector().shape, jnp.int32)
        scratch = {
            "out_smem": tiles.tile(ROWS, self.head_dim, dtype, 1),
            "do_smem": tiles.tile(ROWS, self.head_dim, dtype, 1),
            "arrived": plgpu.Barrier(num_arrivals=2 * self.copies),
        }
        grid = {"tile": pl.cdiv(self.queries, ROWS), "head": self.heads, "entry": self.batch}
        return self.launch(self._body, grid, 1, (self.vector(), counters), scratch)(out_BNHD, do_BNHD)

    def _body(self, out_ref, do_ref, delta_ref, counters_ref, **scratch):
        batch, head, first = lax.axis_index("entry"), lax.axis_index("head"), lax.axis_index("tile") * ROWS
        for ref, name in ((out_ref, "out_smem"), (do_ref, "do_smem")):
            tiles.load_rows(ref, batch, first, head, scratch[name], 0, scratch["arrived"], self.interpret)
        rows = pl.ds(first, ROWS)
        counters_ref.at[batch, head, rows][...] = filled((ROWS,), 0, tiles.BY_ROW, jnp.int32)
        plgpu.barrier_wait(scratch["arrived"])
        pairs = zip(at(scratch["out_smem"], 0), at(scratch["do_smem"], 0), strict=True)
        delta_ref.at[batch, head, rows][...] = sum(row_sums(x, y) for x, y in pairs)


class OrderedKernel(RingKernel):
    """A ring kernel whose thread blocks draw work items, and whose items of a head take turns.

    Work items are as many keys as the compute warpgroups own; all tiles of queries stream past each.
    """

    @property
    def query_tiles(self) -> int:
        return pl.cdiv(self.queries, ROWS)

    @property
    def key_blocks(self) -> int:
        return self.tiles(self.keys)

    @property
    def counters(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.vector().shape, jnp.int32)

    # --- work items ---------------------------------------------------------------------------------------------------

    def item(self, index, number=0) -> WorkItem:
        """Return the work item with this index: blocks of keys in ascending order, of several heads in alternation.

        So an item starts when the item before it in its head is some turns ahead, and rarely waits.
        """
        heads, n = self.batch * self.heads, self.key_blocks
        together = interleaved_heads(heads, self.queries, self.multiprocessors)
        first = lax.div(index, together * n) * together
        rest = index - first * n
        alternating = lax.min(together, heads - first)
        head, tile = first + lax.rem(rest, alternating), lax.div(rest, alternating)
        steps = self.query_tiles
        return WorkItem(lax.div(head, self.heads), lax.rem(head, self.heads), tile, number, number * steps, 0, steps)

    def is_last(self, item: WorkItem):
        """Return whether this is the last item of its head."""
        return item.tile == self.key_blocks - 1

    def for_each_item(self, take, process) -> tuple:
        """Call process(item) for the items that take(number) returns; return their number and that of their tiles."""

        def body(carry):
            number, index = carry
            process(self.item(index, number))
            return number + 1, take(number + 1)

        zero = jnp.int32(0)
        items, _ = lax.while_loop(lambda carry: carry[1] < self.work_items(self.keys), body, (zero, take(zero)))
        return items, items * self.query_tiles

    def tickets(self, readers: int) -> dict:
        """Return scratch in which the loader passes the indices that it draws to other warpgroups."""
        return {
            "ticket_smem": plgpu.SMEM((_TICKETS, 1), jnp.int32),
            "ticket_ready": plgpu.Barrier(num_arrivals=1, num_barriers=_TICKETS),
            "ticket_read": plgpu.Barrier(num_arrivals=readers, num_barriers=_TICKETS),
        }

    def draw(self, number, counters_ref, scratch):
        """Draw the next item for this block; return its index, and pass it to the other warpgroups."""
        slot = lax.rem(number, _TICKETS)
        pl.when(number >= _TICKETS)(lambda: plgpu.barrier_wait(scratch["ticket_read"].at[slot]))
        if self.interpret:  # one block processes all items
            scratch["ticket_smem"][slot, 0] = number
        else:
            _increment(counters_ref.at[0, 0, pl.ds(_DRAWN, _COUNTER)], scratch["ticket_smem"].at[slot])
        plgpu.barrier_arrive(scratch["ticket_ready"].at[slot])
        return scratch["ticket_smem"][slot, 0]

    def drawn(self, number, scratch):
        """Return the index of the item that the loader drew."""
        slot = lax.rem(number, _TICKETS)
        plgpu.barrier_wait(scratch["ticket_ready"].at[slot])
        index = scratch["ticket_smem"][slot, 0]
        plgpu.barrier_arrive(scratch["ticket_read"].at[slot])
        return index

    def finish_tickets(self, items, scratch):
        """Wait for the last phases of ticket_read, as every phase must be; one more ticket was drawn than items."""
        for i in range(_TICKETS):
            number = items + 1 - _TICKETS + i
            wait = scratch["ticket_read"].at[lax.rem(number + _TICKETS, _TICKETS)]
            pl.when(number >= 0)(lambda wait=wait: plgpu.barrier_wait(wait))

    # --- turns --------------------------------------------------------------------------------------------------------

    def _turns(self, item: WorkItem, tile, counters_ref):
        """Return the counter of items that have added to a tile's group."""
        first = lax.div(tile, TURN) * _TURN_ROWS
        return counters_ref.at[item.batch, item.head, pl.ds(first, _COUNTER)]

    def wait_for_turn(self, item: WorkItem, tile, counters_ref):
        """Wait until all items before this one in its head have added to a tile's group."""
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def wait(_ctx, ref, turn):
            semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref))
            semaphore.wait(turn.registers.item(), decrement=False, memory_scope="gpu")
            # The additions that follow are the TMA unit's, in the async proxy.
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

        wait(self._turns(item, tile, counters_ref), item.tile)

    def end_turn(self, item: WorkItem, tile, counters_ref):
        """Wait until this item's additions have arrived, and count its turn."""
        plgpu.wait_smem_to_gmem(0)
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def signal(_ctx, ref):
            mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

        signal(self._turns(item, tile, counters_ref))


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
