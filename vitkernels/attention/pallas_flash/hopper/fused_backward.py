"""The backward kernel of `pallas_flash` on Hopper that computes dq, dk and dv of long sequences without masks.

A sequence is one head's tokens, or one packed segment of them; see fused_order.py.

S and dP are multiplied once, where separate kernels for dq and for dk and dv do so twice. It is for head dims of one
part of 64 columns. A thread block has four warpgroups:

- Two compute. Each owns 64 keys of a work item, keeps their K and V as register operands, accumulates their dk and dv,
  and passes dS of each tile of queries on through shared memory.
- One multiplies dq, which needs dS of both, and adds it to float32 sums in device memory. The sequence's last item adds
  the sums to its own product instead, and stores dq in its final dtype.
- One loads.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.chunks import COUNT, prefers_fused
from vitkernels.attention.pallas_flash.hopper.fused_order import TURN, KeyBlock, OrderedKernel
from vitkernels.attention.pallas_flash.hopper.key_gradients import add_key_gradients
from vitkernels.attention.pallas_flash.hopper.partial_store import store_first_rows
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows
from vitkernels.attention.pallas_flash.hopper.schedule import takes_quads, widths
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    BY_ROW,
    ROWS,
    WGMMA,
    along_columns,
    along_rows,
    at,
    filled,
    transposed,
)

_COMPUTE_REGISTERS, _DQ_REGISTERS, _LOADER_REGISTERS = 200, 72, 40  # per thread
_DS_BUFFERS = 2


class FusedBackward(OrderedKernel):
    """The kernel of one call; see the module."""

    @property
    def sums(self) -> jax.ShapeDtypeStruct:
        """Return dq in float32, rows of a head in sequence."""
        rows = self.batch * self.heads * self.query_tiles * ROWS
        return jax.ShapeDtypeStruct((rows, 64), jnp.float32)

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, counters_BHN, *ids):
        """Return dq, dk and dv in arrays like q's, k's and v's, and dq's float32 sums.

        counters: zeros. ids: what `token_ids` returns for packed segments.
        """
        assert widths(self.head_dim) == (64,), "the registers of a compute warpgroup hold no wider dk and dv"
        assert self.schedule.buffers == 2, "dk and dv are stored while the next item's first tile is processed"
        assert self.has_ids or self.keys > 2 * ROWS, "a sequence's last item adds the other items' sums to its product"
        assert self.has_ids or self.queries > ROWS, "both buffers of dS are used"
        assert not self.has_ids or takes_quads(self.head_dim), "segments of up to 256 tokens are in quads"
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        grid = {"block": self.blocks(self.keys)}
        kernel = self.launch(self._body, grid, self.schedule.warpgroups + 2, (q, k, k, self.sums), self._scratch())
        return kernel(q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN, counters_BHN, *ids)

    def _scratch(self):
        s, dtype = self.schedule, jnp.dtype(self.dtype)
        vectors = plgpu.SMEM((s.stages, s.tile), jnp.float32)
        plain = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        return {
            "k_smem": self.own_tiles(),
            "v_smem": self.own_tiles(),
            "q_smem": self.ring(),
            "do_smem": self.ring(),
            "lse_smem": vectors,
            "delta_smem": vectors,
            "ds_smem": tiles.tile(ROWS, ROWS, dtype, _DS_BUFFERS * s.warpgroups),  # keys by queries
            "dq_smem": tiles.tile(ROWS, self.head_dim, dtype, 1),
            "own_arrived": self.own_arrived(2),  # k, v
            "own_consumed": self.own_consumed(),
            "arrived": self.arrived(4),  # q, do, lse, delta
            "consumed": self.consumed(),
            "ds_ready": plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=_DS_BUFFERS),
            **self.tickets(s.warpgroups + 1),
            "sum_smem": plgpu.SMEM((TURN, ROWS, 64), jnp.float32, transforms=plain),
            "ds_consumed": plgpu.Barrier(num_arrivals=1, num_barriers=_DS_BUFFERS),
        }

    def _body(self, q, k, v, do, lse, delta, counters, *rest, **scratch):
        _, ids, (dq, dk, dv, sums) = self.extras(rest)
        refs = {"q": q, "k": k, "v": v, "do": do, "lse": lse, "delta": delta, "counters": counters, "ids": ids}
        refs |= {"dq": dq, "dk": dk, "dv": dv, "sums": sums}
        computing, warpgroup = self.schedule.warpgroups, lax.axis_index("warpgroup")
        has_work = prefers_fused(ids[4]) if ids else True

        @pl.when(has_work & (warpgroup < computing))
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            self._run_compute(warpgroup, refs, scratch)

        @pl.when(has_work & (warpgroup == computing))
        def _():
            plgpu.set_max_registers(_DQ_REGISTERS, action="decrease")
            self._run_dq(refs, scratch)

        @pl.when(has_work & (warpgroup == computing + 1))
        def _():
            plgpu.set_max_registers(_LOADER_REGISTERS, action="decrease")
            self._run_loader(refs, scratch)

    def _for_each_drawn_item(self, process, refs, scratch):
        """Call process(item) for the items that the loader draws; return their number."""
        take, release = partial(self.drawn, scratch=scratch), partial(self.give_ticket_back, scratch=scratch)
        return self.for_each_item(take, release, process, refs["ids"], scratch)[1]

    # --- the loader ---------------------------------------------------------------------------------------------------

    def _run_loader(self, refs, scratch):
        def load_own(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            arrived = scratch["own_arrived"].at[owner]
            _, k_head, v_head = self.heads_of(item)
            for head, name in ((k_head, "k"), (v_head, "v")):
                smem = scratch[f"{name}_smem"]
                tiles.load_rows(refs[name], item.batch, first, head, smem, owner, arrived, self.interpret)

        def load_tile(item, tile, slot):
            q_head, *_ = self.heads_of(item)
            row, arrived = item.row + (tile - item.first) * ROWS, scratch["arrived"].at[slot]
            for head, name in ((q_head, "q"), (item.head, "do")):
                smem = scratch[f"{name}_smem"]
                tiles.load_rows(refs[name], item.batch, row, head, smem, slot, arrived, self.interpret)
            for name in ("lse", "delta"):
                rows = refs[name].at[item.batch, item.head, pl.ds(tile * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(rows, scratch[f"{name}_smem"].at[slot], arrived)

        def for_each_item(process):
            draw = lambda number: self.draw(number, refs["counters"], refs["ids"], scratch)  # noqa: E731
            nothing = lambda number: None  # noqa: E731
            drawn, items, streamed = self.for_each_item(draw, nothing, process, refs["ids"], scratch)
            self.finish_tickets(drawn, scratch)
            return items, streamed

        own = OwnRows(load_own, (scratch["own_arrived"],), scratch["own_consumed"])
        stream = self.stream(load_tile, scratch["arrived"], scratch["consumed"])
        self._request(for_each_item, own, [stream])

    # --- dk and dv ----------------------------------------------------------------------------------------------------

    def _run_compute(self, warpgroup, refs, scratch):
        def give_back(number):
            """Release the buffers of an item's K and V, once the dk and dv that replaced them are stored."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(scratch["own_consumed"].at[self.owner(number, warpgroup)])

        def process(item):
            def after_first_tile():
                pl.when(item.number > 0)(lambda: give_back(item.number - 1))

            self._compute(item, warpgroup, after_first_tile, refs, scratch)

        items = self._for_each_drawn_item(process, refs, scratch)
        pl.when(items > 0)(lambda: give_back(items - 1))
        plgpu.wait_smem_to_gmem(0)

    def _compute(self, item, warpgroup, after_first_tile, refs, scratch):
        """Process an item: compute dk and dv of this warpgroup's keys, pass dS of each tile on."""
        owner = self.owner(item.number, warpgroup)
        plgpu.barrier_wait(scratch["own_arrived"].at[owner])
        keys = self.rows_of(item, item.place + warpgroup * ROWS)
        if self.has_ids:
            pl.when(keys < ROWS)(lambda: self._clear_rows_from(keys, owner, scratch))
        # Operands in registers spare the bandwidth of shared memory.
        k, v = ((plgpu.load(smem.at[owner], layout=WGMMA),) for (smem,) in (scratch["k_smem"], scratch["v_smem"]))

        start = filled((ROWS,), 0, BY_ROW)
        if self.has_ids or self.keys % (ROWS * self.schedule.warpgroups):
            # A padded row's score would be 0, possibly far above a low lse. Its weight must be 0, as infinity times 0
            # would be NaN in dq.
            start = jnp.where(tiles.row_numbers() < keys, 0.0, self.lowest_product)

        def body(step, sums):
            sums = self._add(item, step, k, v, start, *sums, warpgroup, scratch)
            pl.when(step == 0)(after_first_tile)
            return sums

        (dk,), (dv,) = lax.fori_loop(0, item.steps, body, (self.zeros(), self.zeros()))
        self._store(item, warpgroup, keys, dk * self.scale, dv, refs, scratch)

    def _clear_rows_from(self, first, owner, scratch):
        """Zero the rows past a segment's end, as rows past the last token load as zeros."""
        for (smem,) in (scratch["k_smem"], scratch["v_smem"]):
            x = plgpu.load(smem.at[owner], layout=WGMMA)
            smem.at[owner][...] = jnp.where(tiles.position(x.shape, 0) < first, x, 0)
        plgpu.commit_smem()

    def _store(self, item, warpgroup, keys, dk, dv, refs, scratch):
        """Start storing dk and dv, through the buffers of K and V.

        keys: how many of the rows are those of the item's sequence.
        """
        owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
        _, k_head, v_head = self.heads_of(item)

        def wait():
            """Wait until dq of the last tiles is computed, which reads the keys."""
            for i in range(_DS_BUFFERS):
                step = item.steps - _DS_BUFFERS + i
                plgpu.barrier_wait(scratch["ds_consumed"].at[lax.rem(item.streamed + step, _DS_BUFFERS)])

        def store_all():
            (k_smem,), (v_smem,) = scratch["k_smem"], scratch["v_smem"]
            v_smem.at[owner][...] = dv.astype(self.dtype)
            wait()
            k_smem.at[owner][...] = dk.astype(self.dtype)
            plgpu.commit_smem()
            for head, x in ((k_head, "k"), (v_head, "v")):
                tiles.store_rows(scratch[f"{x}_smem"], owner, refs[f"d{x}"], item.batch, first, head, self.interpret)

        def store_first():
            record = self._record(item, 2 * item.turn + warpgroup, refs)
            for head, x, value in ((k_head, "dk", dk), (v_head, "dv", dv)):
                rows = refs[x].at[item.batch, :, head]
                store_first_rows(rows, (value,), first, record, COUNT, self.interpret)
            wait()

        self._store_rows(keys, store_all, store_first)

    def _store_rows(self, count, store_all, store_first):
        """Store a tile: all of it, or only its first rows if it reaches past a segment's end. count: its own rows."""
        if not self.has_ids:  # rows past the last token are not written
            store_all()
            return
        pl.when(count == ROWS)(store_all)
        pl.when(count < ROWS)(store_first)

    def _record(self, item, chunk, refs):
        """Return the record, in device memory, of one of the chunks of an item's segment."""
        _, _, chunks, *_ = refs["ids"]
        return chunks.at[item.batch, item.first + chunk]

    def _add(self, item, step, k, v, start, dk, dv, warpgroup, scratch):
        """Return dk and dv with a tile's products added: transposed, so that the keys are rows.

        start: of each key, what the product of scores starts from.
        """
        slot = self.slot(item, step)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        starts = along_rows(start, (ROWS, ROWS)), filled((ROWS, ROWS), 0, WGMMA)

        def weights_of(scores):
            return self._weights(scores, slot, scratch)

        def ds_of(weights, dp):
            return self._pass_ds(item, step, weights, dp, slot, warpgroup, scratch)

        streamed = at(scratch["q_smem"], slot), at(scratch["do_smem"], slot)
        sums = add_key_gradients((dk, dv), starts, (k, v), streamed, weights_of, ds_of, self.dtype, self.interpret)
        plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return sums

    def _weights(self, scores, slot, scratch):
        lse = plgpu.load(scratch["lse_smem"].at[slot], layout=BY_COLUMN)
        return jnp.exp2(scores * self.log2_scale - along_columns(lse, scores.shape))

    def _pass_ds(self, item, step, weights, dp, slot, warpgroup, scratch):
        """Pass dS to the warpgroup that multiplies dq; return it as the operand of dk's product."""
        delta = plgpu.load(scratch["delta_smem"].at[slot], layout=BY_COLUMN)
        ds = (weights * (dp - along_columns(delta, dp.shape))).astype(self.dtype)
        buffer = lax.rem(item.streamed + step, _DS_BUFFERS)
        pl.when(step >= _DS_BUFFERS)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[buffer]))
        (ds_smem,) = self._ds(buffer, warpgroup, scratch)
        ds_smem[...] = ds
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch["ds_ready"].at[buffer])
        return ds

    def _ds(self, buffer, warpgroup, scratch):
        """Return the part of dS in a buffer that a warpgroup passes on."""
        return at(scratch["ds_smem"], buffer * self.schedule.warpgroups + warpgroup)

    # --- dq -----------------------------------------------------------------------------------------------------------

    def _run_dq(self, refs, scratch):
        self._for_each_drawn_item(lambda item: self._add_dq(item, refs, scratch), refs, scratch)
        plgpu.wait_smem_to_gmem(0)

    def _add_dq(self, item, refs, scratch):
        """Add an item's dq to the sums of its sequence; or, after the sequence's last item, store it."""
        owners = [self.owner(item.number, warpgroup) for warpgroup in range(self.schedule.warpgroups)]
        for owner in owners:
            plgpu.barrier_wait(scratch["own_arrived"].at[owner])

        def body(tile, _):
            dq = self._dq(item, tile, scratch)

            @pl.when(lax.rem(tile, TURN) == 0)
            def _():
                # The previous turn ends only now, so that its additions had a product's time to arrive.
                pl.when(tile > 0)(lambda: self.end_turn(item, tile - 1, refs["counters"]))
                self.wait_for_turn(item, tile, refs["counters"])

            pl.when(~self.is_last(item))(lambda: self._add_to_sums(item, tile, dq, refs, scratch))
            pl.when(self.is_last(item))(lambda: self._store_dq(item, tile, dq, refs, scratch))

        lax.fori_loop(0, item.steps, body, None)
        self.end_turn(item, item.steps - 1, refs["counters"])

    def _dq(self, item, tile, scratch):
        """Return the product of a tile's dS and the item's keys."""
        buffer, products = lax.rem(item.streamed + tile, _DS_BUFFERS), []
        plgpu.barrier_wait(scratch["ds_ready"].at[buffer])
        for warpgroup in range(self.schedule.warpgroups):
            owner = self.owner(item.number, warpgroup)
            (ds,), (k,) = self._ds(buffer, warpgroup, scratch), at(scratch["k_smem"], self._opaque(owner))
            products.append((0, transposed(ds), k))
        (dq,) = tiles.accumulated((filled((ROWS, 64), 0, WGMMA),), products, self.interpret)
        plgpu.barrier_arrive(scratch["ds_consumed"].at[buffer])
        return dq

    def _opaque(self, index):
        """Return an opaque index, so that addresses are recomputed in each step and not kept in registers."""
        return index if self.interpret else lax.optimization_barrier(jnp.int32(index))

    def _sums_of(self, item: KeyBlock, tile, refs):
        first = ((item.batch * self.heads + item.head) * self.query_tiles + item.first + tile) * ROWS
        return refs["sums"].at[pl.ds(first, ROWS), pl.ds(0, 64)]

    def _add_to_sums(self, item, tile, dq, refs, scratch):
        """Start adding a tile's dq to its sums; the sequence's first item stores it."""
        smem = scratch["sum_smem"].at[lax.rem(tile, TURN)]  # free since the last turn ended
        smem[...] = dq
        plgpu.commit_smem()
        sums = self._sums_of(item, tile, refs)
        if self.interpret:
            sums[...] = jnp.where(item.turn == 0, smem[...], smem[...] + sums[...])
            return
        pl.when(item.turn == 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums))
        pl.when(item.turn > 0)(lambda: plgpu.copy_smem_to_gmem(smem, sums, reduction_op="add"))

    def _store_dq(self, item, tile, dq, refs, scratch):
        """Add the other items' sums to a tile's dq, and start storing it."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        sums = self._sums_of(item, tile, refs)
        others = sums[...] if self.interpret else plgpu.load(sums, layout=WGMMA, optimized=False)
        dq, (q_head, *_) = (dq + others) * self.scale, self.heads_of(item)
        row, count = item.row + tile * ROWS, self.rows_of(item, tile * ROWS)

        def store_all():
            (smem,) = at(scratch["dq_smem"], 0)
            smem[...] = dq.astype(self.dtype)
            plgpu.commit_smem()
            tiles.store_rows(scratch["dq_smem"], 0, refs["dq"], item.batch, row, q_head, self.interpret)

        def store_first():
            rows, record = refs["dq"].at[item.batch, :, q_head], self._record(item, tile, refs)
            store_first_rows(rows, (dq,), row, record, COUNT, self.interpret)

        self._store_rows(count, store_all, store_first)
