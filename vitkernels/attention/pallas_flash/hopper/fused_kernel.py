"""The frame of the fused backward kernel of `pallas_flash` on Hopper: the order of work items and of additions to dq.

A work item is a head's block of 128 keys. Two compute warpgroups own 64 keys each, keep dk and dv in registers, and
pass dS of each tile of queries on through shared memory. The product of dS and the item's keys is added to the tile's
dq in device memory, in float32. The head's last item adds its own product, and stores dq in its final dtype.

Results are bit-equal from run to run, because the items of a head add to a tile in ascending order of their keys. A
counter per group of tiles says whose turn it is.

An item only ever waits for items with lower numbers, and thread blocks draw items in ascending order, when they run. So
the unfinished item with the lowest number never waits, whichever blocks run at a time: the kernel cannot deadlock.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows, RingKernel, Stream, WorkItem
from vitkernels.attention.pallas_flash.hopper.schedule import interleaved_heads, widths
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    LOG2E,
    ROWS,
    WGMMA,
    along_columns,
    at,
    filled,
    row_sums,
    transposed,
)

DS_BUFFERS = 2
_TICKETS = 2  # buffers for the numbers of items that a block has drawn
_COUNTER = 8  # integers: the least that a slice of an array holds
_DRAWN = ROWS  # where the counter of drawn items lies, in the first head's row of counters


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


class FusedKernel(RingKernel):
    """The order of items, turns, the loader, and the compute warpgroups' frame.

    FusedBackward defines _hold(item, warpgroup, scratch), which prepares for an item; _add(item, step, dk, dv, held,
    warpgroup, refs, scratch), which returns dk and dv with a tile's products added; and _add_dq(item, refs, scratch),
    which another warpgroup runs for each item.
    """

    group: int  # tiles of queries that an item adds to in one turn
    registers: tuple[int, int, int]  # per thread of a compute warpgroup, of the one for dq, and of the loader

    @property
    def query_tiles(self) -> int:
        return pl.cdiv(self.queries, ROWS)

    @property
    def key_blocks(self) -> int:
        return self.tiles(self.keys)

    @property
    def sums(self) -> jax.ShapeDtypeStruct:
        """Return dq in float32, rows of a head in sequence."""
        rows = self.batch * self.heads * self.query_tiles * ROWS
        return jax.ShapeDtypeStruct((rows, sum(widths(self.head_dim))), jnp.float32)

    def counters(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.vector().shape, jnp.int32)

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, counters_BHN):
        """Return dq, dk and dv in arrays like q's, k's and v's, and dq's float32 sums. counters: zeros."""
        assert self.key_blocks > 1, "a head's last item adds its product to that of the other items"
        s = self.schedule
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        grid = {"block": self.blocks(self.keys)}
        kernel = self.launch(self._body, grid, s.warpgroups + 2, (q, k, k, self.sums), self._scratch())
        return kernel(q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, counters_BHN)

    def _scratch(self):
        s, dtype = self.schedule, jnp.dtype(self.dtype)
        vectors = plgpu.SMEM((s.stages, s.tile), jnp.float32)
        return {
            "k_smem": self._parts(self.owners),
            "v_smem": self._parts(self.owners),
            "q_smem": self.ring(),
            "do_smem": self.ring(),
            "lse_smem": vectors,
            "delta_smem": vectors,
            "ds_smem": tiles.tile(ROWS, ROWS, dtype, DS_BUFFERS * s.warpgroups),  # keys by queries
            "dq_smem": self._parts(1),
            "own_arrived": self.own_arrived(2 * self.copies),
            "own_consumed": self.own_consumed(),
            "arrived": self.arrived(2 * self.copies + 2),
            "consumed": self.consumed(),
            "ds_ready": plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=DS_BUFFERS),
            "ticket_smem": plgpu.SMEM((_TICKETS, 1), jnp.int32),
            "ticket_ready": plgpu.Barrier(num_arrivals=1, num_barriers=_TICKETS),
            "ticket_read": plgpu.Barrier(num_arrivals=s.warpgroups + 1, num_barriers=_TICKETS),
        }

    def _parts(self, tile_count):
        """Return scratch for tiles of 64 rows of a head: part p of tile i is at i * copies + p."""
        return tiles.tile(ROWS, 64, jnp.dtype(self.dtype), tile_count * self.copies)[0]

    def _copies(self, array_ref, batch, first, head, smem, index):
        """Yield the slices of 64 rows of a head, and the parts of tile `index` of `smem` that correspond to them."""
        for part in range(self.copies):
            rows, columns = (pl.ds(tiles.unchecked(start), 64) for start in (first, 64 * part))
            tile = tiles.untiled(smem, index * self.copies + part, self.interpret)
            yield array_ref.at[batch, rows, head, columns], tile

    # --- the order of work items --------------------------------------------------------------------------------------

    def item(self, index, number=0) -> WorkItem:
        """Return the work item with this index: blocks of keys in ascending order, of several heads in alternation.

        So an item starts when the item before it in its head is some groups of tiles ahead, and rarely waits.
        """
        heads, n = self.batch * self.heads, self.key_blocks
        together = interleaved_heads(heads, self.queries, self.multiprocessors)
        first = lax.div(index, together * n) * together
        rest = index - first * n
        alternating = lax.min(together, heads - first)
        head, tile = first + lax.rem(rest, alternating), lax.div(rest, alternating)
        steps = self.query_tiles
        return WorkItem(lax.div(head, self.heads), lax.rem(head, self.heads), tile, number, number * steps, 0, steps)

    def _for_each(self, take, process) -> tuple:
        """Call process(item) for the items that take(number) returns; return their number and that of their tiles."""

        def body(carry):
            number, index = carry
            process(self.item(index, number))
            return number + 1, take(number + 1)

        zero = jnp.int32(0)
        items, _ = lax.while_loop(lambda carry: carry[1] < self.work_items(self.keys), body, (zero, take(zero)))
        return items, items * self.query_tiles

    def _draw(self, number, refs, scratch):
        """Draw the next item for this block; return its index, and pass it to the other warpgroups."""
        slot = lax.rem(number, _TICKETS)
        pl.when(number >= _TICKETS)(lambda: plgpu.barrier_wait(scratch["ticket_read"].at[slot]))
        if self.interpret:
            scratch["ticket_smem"][slot, 0] = number
        else:
            _increment(refs["counters"].at[0, 0, pl.ds(_DRAWN, _COUNTER)], scratch["ticket_smem"].at[slot])
        plgpu.barrier_arrive(scratch["ticket_ready"].at[slot])
        return scratch["ticket_smem"][slot, 0]

    def _drawn(self, number, scratch):
        """Return the index of the item that the loader drew."""
        slot = lax.rem(number, _TICKETS)
        plgpu.barrier_wait(scratch["ticket_ready"].at[slot])
        index = scratch["ticket_smem"][slot, 0]
        plgpu.barrier_arrive(scratch["ticket_read"].at[slot])
        return index

    # --- roles --------------------------------------------------------------------------------------------------------

    def _body(self, q, k, v, do, lse, delta, counters, dq, dk, dv, sums, **scratch):
        refs = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta, "counters": counters}
        refs |= {"dq": dq, "dk": dk, "dv": dv, "sums": sums}
        warpgroups, warpgroup = self.schedule.warpgroups, lax.axis_index("warpgroup")

        @pl.when(warpgroup < warpgroups)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            self._run_compute(warpgroup, refs, scratch)

        @pl.when(warpgroup == warpgroups)
        def _():
            plgpu.set_max_registers(self.registers[1], action="decrease")
            self._for_each(lambda number: self._drawn(number, scratch), lambda item: self._add_dq(item, refs, scratch))
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == warpgroups + 1)
        def _():
            plgpu.set_max_registers(self.registers[2], action="decrease")
            self._run_loader(refs, scratch)

    def _run_loader(self, refs, scratch):
        def load_own(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            arrived = scratch["own_arrived"].at[owner]
            _, k_head, v_head = self.heads_of(item)
            for head, name in ((k_head, "k"), (v_head, "v")):
                for source, smem in self._copies(refs[name], item.batch, first, head, scratch[f"{name}_smem"], owner):
                    plgpu.copy_gmem_to_smem(source, smem, arrived)

        def load_tile(item, tile, slot):
            q_head, *_ = self.heads_of(item)
            first, arrived = tile * ROWS, scratch["arrived"].at[slot]
            for head, name in ((q_head, "q"), (item.head, "do")):
                smem = scratch[f"{name}_smem"]
                tiles.load_rows(refs[name], item.batch, first, head, smem, slot, arrived, self.interpret)
            for name in ("lse", "delta"):
                rows = refs[name].at[item.batch, item.head, pl.ds(first, ROWS)]
                plgpu.copy_gmem_to_smem(rows, scratch[f"{name}_smem"].at[slot], arrived)

        def draw(number):
            return self._draw(number, refs, scratch)

        own = OwnRows(load_own, (scratch["own_arrived"],), scratch["own_consumed"])
        stream = Stream(load_tile, scratch["arrived"], scratch["consumed"])
        items, _ = self._request(lambda process: self._for_each(draw, process), own, [stream])
        for i in range(_TICKETS):  # every phase of a barrier must be waited for; one more ticket was drawn than items
            number = items + 1 - _TICKETS + i
            wait = scratch["ticket_read"].at[lax.rem(number + _TICKETS, _TICKETS)]
            pl.when(number >= 0)(lambda wait=wait: plgpu.barrier_wait(wait))

    def _run_compute(self, warpgroup, refs, scratch):
        buffers = self.schedule.buffers

        def give_back(number):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch["own_consumed"].at[self.owner(number, warpgroup)])

        def process(item):
            def after_first_tile():
                if buffers > 1:
                    pl.when(item.number > 0)(lambda: give_back(item.number - 1))

            self._compute(item, warpgroup, after_first_tile, refs, scratch)
            if buffers == 1:
                give_back(item.number)

        items, _ = self._for_each(lambda number: self._drawn(number, scratch), process)
        if buffers > 1:
            pl.when(items > 0)(lambda: give_back(items - 1))
        plgpu.wait_smem_to_gmem(0)

    # --- dk, dv and dS ------------------------------------------------------------------------------------------------

    def _compute(self, item, warpgroup, after_first_tile, refs, scratch):
        """Process an item: compute dk and dv of this warpgroup's keys, pass dS of each tile on."""
        owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        plgpu.barrier_wait(scratch["own_arrived"].at[owner])
        held = self._hold(item, warpgroup, scratch)

        def body(step, carry):
            carry = self._add(item, step, *carry, held, warpgroup, refs, scratch)
            pl.when(step == 0)(after_first_tile)
            return carry

        dk, dv = lax.fori_loop(0, self.query_tiles, body, (self.zeros(), self.zeros()))
        for i, x in enumerate(dv):
            scratch["v_smem"].at[owner * self.copies + i][...] = x.astype(self.dtype)
        # The keys are read until dq of the last tiles is computed.
        for step in range(max(0, self.query_tiles - DS_BUFFERS), self.query_tiles):
            plgpu.barrier_wait(scratch["ds_consumed"].at[lax.rem(item.streamed + step, DS_BUFFERS)])
        for i, x in enumerate(dk):
            scratch["k_smem"].at[owner * self.copies + i][...] = (x * self.scale).astype(self.dtype)
        plgpu.commit_smem()
        _, k_head, v_head = self.heads_of(item)
        self._store(refs["dk"], item.batch, first, k_head, scratch["k_smem"], owner)
        self._store(refs["dv"], item.batch, first, v_head, scratch["v_smem"], owner)

    def _store(self, *where):
        for destination, smem in self._copies(*where):
            plgpu.copy_smem_to_gmem(smem, destination)

    def _opaque(self, index):
        """Return an opaque index, so that addresses are recomputed in each step and not kept in registers."""
        return index if self.interpret else lax.optimization_barrier(jnp.int32(index))

    def _weights(self, scores, slot, scratch):
        lse = plgpu.load(scratch["lse_smem"].at[slot], layout=BY_COLUMN)
        exponents = scores * (self.scale * LOG2E) - along_columns(lse, scores.shape)
        # Padded rows have scores of 0, possibly far above a low lse: exp2 would overflow, and inf times 0 is NaN in dq.
        if self.keys % (ROWS * self.schedule.warpgroups):
            exponents = jnp.minimum(exponents, 0.0)
        return jnp.exp2(exponents)

    def _pass_ds(self, item, step, weights, dp, slot, warpgroup, scratch):
        """Pass dS to the warpgroups that compute dq; return it as the operand of dk's product."""
        delta = plgpu.load(scratch["delta_smem"].at[slot], layout=BY_COLUMN)
        ds = (weights * (dp - along_columns(delta, dp.shape))).astype(self.dtype)
        buffer = lax.rem(item.streamed + step, DS_BUFFERS)
        pl.when(step >= DS_BUFFERS)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[buffer]))
        at(scratch["ds_smem"], buffer * self.schedule.warpgroups + warpgroup)[0][...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["ds_ready"].at[buffer])
        return ds

    def _owners_of(self, item):
        return [self.owner(item.number, warpgroup) for warpgroup in range(self.schedule.warpgroups)]

    def _dq(self, item, tile, part, scratch):
        """Return a part of the product of a tile's dS and the item's keys."""
        buffer, products = lax.rem(item.streamed + tile, DS_BUFFERS), []
        plgpu.barrier_wait(scratch["ds_ready"].at[buffer])
        for warpgroup, owner in enumerate(self._owners_of(item)):
            (ds,) = at(scratch["ds_smem"], buffer * self.schedule.warpgroups + warpgroup)
            k = scratch["k_smem"].at[self._opaque(owner) * self.copies + part]
            products.append((0, transposed(ds), k))
        (dq,) = tiles.accumulated((filled((ROWS, 64), 0, WGMMA),), products, self.interpret)
        plgpu.barrier_arrive(scratch["ds_consumed"].at[buffer])
        return dq

    def _is_last(self, item):
        return item.tile == self.key_blocks - 1

    # --- sums of dq and turns -----------------------------------------------------------------------------------------

    def _sums(self, item, tile, part, refs):
        """Return the slice of dq's sums for a part of a tile."""
        first = ((item.batch * self.heads + item.head) * self.query_tiles + tile) * ROWS
        return refs["sums"].at[pl.ds(first, ROWS), pl.ds(64 * part, 64)]

    def _counter(self, item, tile, refs):
        """Return how many items have added to a group of tiles."""
        first = lax.div(tile, self.group) * (self.group * ROWS)
        return refs["counters"].at[item.batch, item.head, pl.ds(first, _COUNTER)]

    def _wait_for_turn(self, item, tile, refs):
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.Layout.WG_SPLAT(())))
        def wait(_ctx, ref, turn):
            semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref))
            semaphore.wait(turn.registers.item(), decrement=False, memory_scope="gpu")
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

        wait(self._counter(item, tile, refs), item.tile)

    def _end_turn(self, item, tile, refs):
        """Wait until the additions have arrived, and count this turn."""
        plgpu.wait_smem_to_gmem(0)
        if self.interpret:
            return

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def signal(_ctx, ref):
            mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(ref)).signal(1, memory_scope="gpu")

        signal(self._counter(item, tile, refs))

    def _add_to_sums(self, item, tile, part, smem, refs):
        """Start adding a part of dq, in shared memory, to a tile's sums; the head's first item stores it."""
        sums = self._sums(item, tile, part, refs)
        if self.interpret:
            sums[...] = jnp.where(item.tile == 0, smem[...], smem[...] + sums[...])
            return
        pl.when(item.tile == 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums))
        pl.when(item.tile > 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums, reduction_op="add"))

    def _round_dq(self, part, dq, scratch):
        """Leave a part of dq in shared memory, to be stored."""
        scratch["dq_smem"].at[part][...] = (dq * self.scale).astype(self.dtype)
        plgpu.commit_smem()

    def _store_dq(self, item, tile, refs, scratch):
        self._store(refs["dq"], item.batch, tile * ROWS, self.heads_of(item)[0], scratch["dq_smem"], 0)


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
