"""The backward kernel of `pallas_flash` on Hopper that computes dq, dk and dv of long sequences without masks.

A sequence is one head's tokens, or one packed segment of them; see fused_order.py.

S and dP are multiplied once, where separate kernels for dq and for dk and dv do so twice. It is for head dims of one
part of 64 columns. A thread block has four warpgroups:

- Two compute. Each owns 64 keys of a work item and accumulates their dk and dv, while tiles of 128 queries stream by.
  Of each tile, each also multiplies dq of 64 queries with all 128 keys. That needs the other warpgroup's dS, so it is
  done one tile later: neither waits for the other, and one computes weights while the other one multiplies. dq of an
  item's last tile is left to the first step of the block's next item, if it has one and the sequence does not end.
- One adds dq to float32 sums in device memory, in turns. The sequence's last item adds the sums to its own product
  instead, and dq is stored in its final dtype.
- One loads.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.chunks import COUNT, prefers_fused
from vitkernels.attention.pallas_flash.hopper.fused_order import TILE
from vitkernels.attention.pallas_flash.hopper.fused_sums import HALVES, SummingKernel, buffer_of
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows
from vitkernels.attention.pallas_flash.hopper.row_registers import store_first_rows
from vitkernels.attention.pallas_flash.hopper.schedule import takes_quads, widths
from vitkernels.attention.pallas_flash.hopper.tiles import (
    BY_COLUMN,
    ROWS,
    WGMMA,
    along_columns,
    along_rows,
    at,
    filled,
    first_rows,
    transposed,
)

_COMPUTE_REGISTERS, _HELPER_REGISTERS = 232, 24  # per thread
_STARTS = "of_scores", "of_dp"  # what the products of a tile start from; see fused_order.Starts


class TileStep(NamedTuple):
    """A step of a compute warpgroup: a tile of queries streams past its keys."""

    item: Any  # a KeyBlock
    number: Any  # that of the tile in its sequence
    columns: int  # of S and dP; at most the tile's rows
    warpgroup: Any
    is_open: Any  # whether dq of the previous item's last tile is left to this item's first step

    @property
    def place(self):
        """Return how many tiles streamed past the block's keys before this one."""
        return self.item.streamed + self.number

    @property
    def is_pending(self):
        """Return whether dq of the tile before is multiplied in this step."""
        return self.is_open | (self.number > 0)

    @property
    def halves(self) -> range:
        return range(pl.cdiv(self.columns, ROWS))


class FusedBackward(SummingKernel):
    """The kernel of one call; see the module.

    place: of a tile, how many tiles streamed past the block's items before it.
    """

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, of_scores_BHN, of_dp_BHN, counters_BHN, *ids):
        """Return dq, dk and dv in arrays like q's, k's and v's, and dq's float32 sums.

        of_scores, of_dp, counters: what Starts returns. ids: what `token_ids` returns for packed segments.
        """
        s = self.schedule
        assert widths(self.head_dim) == (64,), "a compute warpgroup's registers hold no wider dk and dv"
        assert (s.tile, s.stages, s.warpgroups, s.buffers) == (TILE, 2, 2, 2), "the code relies on these"
        assert self.has_ids or self.keys > 2 * ROWS, "a sequence's last item adds the other items' sums to its product"
        assert self.has_ids or self.queries > TILE, "an item uses both buffers of dS"
        assert not self.has_ids or takes_quads(self.head_dim), "segments of up to 256 tokens are in quads"
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        grid = {"block": self.blocks(self.keys)}
        kernel = self.launch(self._body, grid, s.warpgroups + 2, (q, k, k, self.sums), self._scratch())
        return kernel(q_BNHD, k_BMHD, v_BMHD, do_BNHD, of_scores_BHN, of_dp_BHN, counters_BHN, *ids)

    def _scratch(self):
        s, dtype = self.schedule, jnp.dtype(self.dtype)
        by_all = plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=2)
        return {
            "k_smem": self.own_tiles(),
            "v_smem": self.own_tiles(),
            "q_smem": self.ring(),
            "do_smem": self.ring(),
            "starts_smem": plgpu.SMEM((len(_STARTS), s.tile), jnp.float32),
            "ds_smem": tiles.tile(ROWS, ROWS, dtype, 2 * s.warpgroups * HALVES),  # keys by queries; see ds_index
            "own_arrived": self.own_arrived(2),  # k, v
            "own_consumed": plgpu.Barrier(num_arrivals=s.warpgroups, num_barriers=self.owners),
            "arrived": self.arrived(2 + len(_STARTS)),  # q, do, starts
            "consumed": self.consumed(),
            "starts_read": plgpu.Barrier(num_arrivals=s.warpgroups),
            "ds_ready": by_all,
            "ds_consumed": by_all,
            **self.sums_scratch(),
            **self.tickets(s.warpgroups + 1),
        }

    def _body(self, q, k, v, do, of_scores, of_dp, counters, *rest, **scratch):
        _, ids, (dq, dk, dv, sums) = self.extras(rest)
        refs = {"q": q, "k": k, "v": v, "do": do, "of_scores": of_scores, "of_dp": of_dp}
        refs |= {"counters": counters, "ids": ids, "dq": dq, "dk": dk, "dv": dv, "sums": sums}
        computing, warpgroup = self.schedule.warpgroups, lax.axis_index("warpgroup")
        has_work = prefers_fused(ids[4]) if ids else True

        @pl.when(has_work & (warpgroup < computing))
        def _():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            self._run_compute(warpgroup, refs, scratch)

        @pl.when(has_work & (warpgroup == computing))
        def _():
            plgpu.set_max_registers(_HELPER_REGISTERS, action="decrease")
            self._for_each_drawn_item(lambda item, _: self.add_to_sums(item, refs, scratch), refs, scratch)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(has_work & (warpgroup == computing + 1))
        def _():
            plgpu.set_max_registers(_HELPER_REGISTERS, action="decrease")
            self._run_loader(refs, scratch)

    def _for_each_drawn_item(self, process, refs, scratch, close=None):
        """Call process(item, is_open) for the items that the loader draws; return for_each_item's results."""
        take, release = partial(self.drawn, scratch=scratch), partial(self.give_ticket_back, scratch=scratch)
        return self.for_each_item(take, release, process, refs["ids"], scratch, close)

    # --- the loader ---------------------------------------------------------------------------------------------------

    def _run_loader(self, refs, scratch):
        def load_own(item, warpgroup):
            owner, first = self.owner(item.number, warpgroup), self.first_row(item, warpgroup)
            arrived = scratch["own_arrived"].at[owner]
            _, k_head, v_head = self.heads_of(item)
            for name, head in (("k", k_head), ("v", v_head)):
                smem = scratch[f"{name}_smem"]
                tiles.load_rows(refs[name], item.batch, first, head, smem, owner, arrived, self.interpret)

        def load_tile(item, tile, slot):
            q_head, *_ = self.heads_of(item)
            tile, arrived = tile - item.first, scratch["arrived"].at[slot]  # _request counts tiles from item.first on
            for head, name in ((q_head, "q"), (item.head, "do")):
                where = item.batch, item.row + tile * TILE, head
                tiles.load_rows(refs[name], *where, scratch[f"{name}_smem"], slot, arrived, self.interpret)
            pl.when(item.streamed + tile > 0)(lambda: plgpu.barrier_wait(scratch["starts_read"]))  # of the tile before
            for i, name in enumerate(_STARTS):
                rows = refs[name].at[item.batch, item.head, pl.ds(item.first * ROWS + tile * TILE, TILE)]
                plgpu.copy_gmem_to_smem(rows, scratch["starts_smem"].at[i], arrived)

        def for_each_item(process):
            draw = lambda number: self.draw(number, refs["counters"], refs["ids"], scratch)  # noqa: E731
            nothing = lambda number: None  # noqa: E731
            results = self.for_each_item(draw, nothing, lambda item, _: process(item), refs["ids"], scratch)
            drawn, items, streamed, _ = results
            self.finish_tickets(drawn, scratch)
            return items, streamed

        own = OwnRows(load_own, (scratch["own_arrived"],), scratch["own_consumed"])
        stream = self.stream(load_tile, scratch["arrived"], scratch["consumed"])
        items, _ = self._request(for_each_item, own, [stream])
        pl.when(items > 0)(lambda: plgpu.barrier_wait(scratch["starts_read"]))  # every phase must be waited for

    # --- dk and dv ----------------------------------------------------------------------------------------------------

    def _run_compute(self, warpgroup, refs, scratch):
        process = lambda item, is_open: self._compute(item, is_open, warpgroup, refs, scratch)  # noqa: E731
        close = lambda items, streamed: self._close(items, streamed, warpgroup, scratch)  # noqa: E731
        _, items, streamed, is_open = self._for_each_drawn_item(process, refs, scratch, close)
        pl.when(is_open)(lambda: close(items, streamed))
        # Every phase of a barrier must be waited for.
        pl.when(items > 0)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[buffer_of(streamed - 1)]))
        plgpu.wait_smem_to_gmem(0)

    def _compute(self, item, is_open, warpgroup, refs, scratch):
        """Process an item: compute dk and dv of this warpgroup's keys, and dq of half of each tile."""
        for i in range(self.schedule.warpgroups):
            plgpu.barrier_wait(scratch["own_arrived"].at[self.owner(item.number, i)])
        keys = self.rows_of(item, item.place + warpgroup * ROWS)
        if self.has_ids:
            pl.when(keys < ROWS)(lambda: self._clear_rows_from(keys, item, warpgroup, scratch))
        lowest = None
        if self.has_ids or self.keys % (ROWS * self.schedule.warpgroups):
            # A padded row's score would be 0, possibly far above a low lse. Its weight must be 0, as infinity times 0
            # would be NaN in dq.
            lowest = jnp.where(tiles.row_numbers() < keys, 0.0, self.lowest_product)

        def over(columns, first, end, sums):
            def body(number, sums):
                step = TileStep(item, number, columns, warpgroup, is_open)
                return self._add(step, lowest, *sums, scratch)

            return lax.fori_loop(first, end, body, sums)

        sums = self.zeros(), self.zeros()
        if self.has_ids:
            full = item.steps - self._halved(item)
            sums = over(ROWS, full, item.steps, over(TILE, 0, full, sums))
        else:
            full, rest = divmod(self.queries, TILE)
            sums = over(TILE, 0, full, sums)
            if rest:  # a loop whose end the compiler does not know; see ring.over_tiles
                sums = over(tiles.padded_columns(rest), full, self.opaque(full + 1), sums)
        (dk,), (dv,) = sums
        item = self.reread(item)  # the loop needs the registers
        keys = self.rows_of(item, item.place + warpgroup * ROWS)
        pl.when(self.is_last(item))(lambda: self._finish_sequence(item, warpgroup, refs, scratch))
        pl.when(~self.is_last(item))(lambda: self.publish_dq(warpgroup, scratch))  # of the last tile but one
        self._store(item, warpgroup, keys, dk * self.scale, dv, refs, scratch)

    def _halved(self, item):
        """Return 1 if only the first half of a segment's last tile has queries, else 0."""
        return (self.rows_of(item, item.steps * TILE - ROWS) <= 0).astype(jnp.int32)

    def _close(self, items, streamed, warpgroup, scratch):
        """Pass on dq of the last tile of the block's previous item, where no other item follows that does so.

        items, streamed: how many items and tiles the block has processed.
        """
        self._publish_ds(streamed - 1, scratch)
        dq = self._multiply_dq(streamed - 1, items - 1, warpgroup, scratch)
        self.write_dq(streamed - 1, dq, warpgroup, scratch)
        self.publish_dq(warpgroup, scratch)
        self._release_own(items - 1, scratch)

    def _keys_at(self, number, warpgroup, scratch):
        """Return a warpgroup's keys of the block's item with this number, at an address that is computed anew."""
        (k,) = at(scratch["k_smem"], self.opaque(self.owner(number, warpgroup)))
        return k

    def _release_own(self, number, scratch):
        """Release the keys and values of both warpgroups: this one has multiplied dS with their keys."""
        for i in range(self.schedule.warpgroups):
            plgpu.barrier_arrive(scratch["own_consumed"].at[self.owner(number, i)])

    def _clear_rows_from(self, first, item, warpgroup, scratch):
        """Zero the rows past a segment's end, as rows past the last token load as zeros."""
        for name in ("k_smem", "v_smem"):
            (smem,) = at(scratch[name], self.owner(item.number, warpgroup))
            x = plgpu.load(smem, layout=WGMMA)
            smem[...] = jnp.where(tiles.position(x.shape, 0) < first, x, 0)
        plgpu.commit_smem()

    def _store(self, item, warpgroup, keys, dk, dv, refs, scratch):
        """Start storing dk and dv, through this warpgroup's part of a buffer of dS: that of the last tile but one.

        keys: how many of the rows are those of the item's sequence.
        """
        buffer, first = buffer_of(item.streamed + item.steps), self.first_row(item, warpgroup)
        plgpu.barrier_wait(scratch["ds_consumed"].at[buffer])
        _, k_head, v_head = self.heads_of(item)
        results = ("dk", dk, k_head), ("dv", dv, v_head)

        def store_all():
            for half, (_, x, _) in enumerate(results):
                (smem,) = at(scratch["ds_smem"], self.ds_index(buffer, warpgroup, half))
                smem[...] = x.astype(self.dtype)
            plgpu.commit_smem()
            for half, (name, _, head) in enumerate(results):
                index = self.ds_index(buffer, warpgroup, half)
                tiles.store_rows(scratch["ds_smem"], index, refs[name], item.batch, first, head, self.interpret)

        def store_first():
            record = self._record(item, 2 * item.turn + warpgroup, refs)
            for name, x, head in results:
                store_first_rows(refs[name].at[item.batch, :, head], (x,), first, record, COUNT, self.interpret)

        self.store_rows_of(keys, store_all, store_first)

    def _record(self, item, chunk, refs):
        """Return the record, in device memory, of one of the chunks of an item's segment."""
        _, _, chunks, *_ = refs["ids"]
        return chunks.at[item.batch, item.first + chunk]

    # --- a step -------------------------------------------------------------------------------------------------------

    def _add(self, step: TileStep, lowest, dk, dv, scratch):
        """Return dk and dv with a tile's products added: transposed, so that the keys are rows.

        Write dS of this tile, and this warpgroup's half of dq of the tile before; the next step passes them on.

        lowest: of each key, what is added to its scores; None: nothing.
        """
        item, slot = step.item, self.slot(step.item, step.number)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        (q,), (do,) = at(scratch["q_smem"], slot), at(scratch["do_smem"], slot)
        k = self._keys_at(item.number, step.warpgroup, scratch)
        (v,) = at(scratch["v_smem"], self.opaque(self.owner(item.number, step.warpgroup)))
        starts = self._starts(step, lowest, scratch)
        multiply = self._multiply_interpreted if self.interpret else self._multiply
        dk, dv = multiply(step, starts, (k, v), (q, do), dk, dv, scratch)
        plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return dk, dv

    def _starts(self, step: TileStep, lowest, scratch) -> tuple:
        """Return what the products of scores and of dP start from."""

        def start(name):
            row = scratch["starts_smem"].at[_STARTS.index(name), pl.ds(0, step.columns)]
            return along_columns(plgpu.load(row, layout=BY_COLUMN), (ROWS, step.columns))

        of_scores = start("of_scores")
        if lowest is not None:
            of_scores += along_rows(lowest, of_scores.shape)
        return of_scores, start("of_dp")

    def _multiply(self, step: TileStep, starts, keys, queries, dk, dv, scratch):
        (k, v), (q, do) = keys, queries
        (some_q, some_do), halves = first_rows((q, do), step.columns), step.halves

        def chain(chain_refs):
            scores_ref, dp_ref, dq_ref, dk_ref, dv_ref = chain_refs
            plgpu.wgmma(scores_ref, k, transposed(some_q))
            plgpu.wgmma(dp_ref, v, transposed(some_do))
            self._publish(step, scratch)  # while these run

            def start_dq():
                # Where none is pending, a product of what happens to be there, which is dropped.
                pl.when(step.is_pending)(lambda: self._wait_for_ds(step.place - 1, scratch))
                dq_ref[...] = filled((ROWS, ROWS), 0, WGMMA)
                for a, b in self._factors_of_dq(step.place - 1, _item_before(step), step.warpgroup, scratch):
                    plgpu.wgmma(dq_ref, a, b)

            scores, ds, dp = plgpu.wgmma_accumulator_load(scores_ref, wait_n=1), [], None
            for half in halves:  # registers hold the weights of one half in float32
                weights = self._weights(_half(scores, half))
                plgpu.wgmma(dv_ref, self._operand(weights), _rows(do, half))
                if dp is None:
                    dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)
                ds.append(self._operand(weights * _half(dp, half)))
                if half < halves[-1]:
                    plgpu.wgmma(dk_ref, ds[half], _rows(q, half))
            if self._starts_dq_early:
                start_dq()
            self._write_ds(step, ds, scratch)
            if not self._starts_dq_early:
                start_dq()
            plgpu.wgmma(dk_ref, ds[-1], _rows(q, halves[-1]))
            self._end_dq(step, plgpu.wgmma_accumulator_load(dq_ref, wait_n=1), scratch)

        values = *starts, filled((ROWS, ROWS), 0, WGMMA), *dk, *dv
        *_, dk, dv = pl.run_state(chain)(jax.tree.map(plgpu.ACC.init, values))
        return (dk,), (dv,)

    def _multiply_interpreted(self, step: TileStep, starts, keys, queries, dk, dv, scratch):
        """Do what _multiply does; the interpreter supports neither pl.run_state nor register operands."""
        halves, terms = step.halves, []
        for start, own, streamed in zip(starts, keys, queries, strict=True):
            terms.append((start, (own,), first_rows((streamed,), step.columns)))
        scores, dp = tiles.products(*terms, interpret=True)
        self._publish(step, scratch)
        weights = [self._weights(_half(scores, half)) for half in halves]
        ds = [self._operand(x * _half(dp, half)) for half, x in zip(halves, weights, strict=True)]
        self._write_ds(step, ds, scratch)

        @pl.when(step.is_pending)
        def _():
            dq = self._multiply_dq(step.place - 1, _item_before(step), step.warpgroup, scratch)
            self._end_dq(step, dq, scratch)

        q, do = queries
        products = [(0, ds[half], _rows(q, half)) for half in halves]
        products += [(1, self._operand(weights[half]), _rows(do, half)) for half in halves]
        dk, dv = tiles.accumulated((*dk, *dv), products, interpret=True)
        return (dk,), (dv,)

    def _weights(self, scores):
        return jnp.exp2(scores * self.log2_scale)

    def _operand(self, x):
        return tiles.widened(x.astype(self.dtype))

    def _publish(self, step: TileStep, scratch):
        """Pass on what was written in the step before: dS of its tile, and dq of the tile before that."""
        tiles.fence_shared_memory(self.interpret)
        plgpu.barrier_arrive(
            scratch["starts_read"]
        )  # the products of S and dP, whose accumulators start from them, have been issued
        pl.when(step.is_pending)(lambda: plgpu.barrier_arrive(scratch["ds_ready"].at[buffer_of(step.place + 1)]))
        # In an item's first step, that would be dq of the previous item's last tile but one, which that item passed on.
        has_dq = (step.number > 1) | ((step.number == 1) & step.is_open)
        pl.when(has_dq)(lambda: plgpu.barrier_arrive(scratch["sum_ready"].at[step.warpgroup]))

    def _end_dq(self, step: TileStep, dq, scratch):
        """Write what this step multiplied: dq of the tile before."""
        item, warpgroup = step.item, step.warpgroup

        @pl.when(step.is_pending)
        def _():
            completes = self.is_last(item) & (step.number > 0)
            pl.when(~completes)(lambda: self.write_dq(step.place - 1, dq, warpgroup, scratch))
            pl.when(completes)(lambda: self._complete_dq(item, step.number - 1, dq, warpgroup, scratch))

        pl.when(step.is_open & (step.number == 0))(lambda: self._release_own(item.number - 1, scratch))

    @property
    def _starts_dq_early(self) -> bool:
        """Return whether dq's product is issued before dS is stored.

        That is 1 to 2 % faster, but not with a narrow last tile.
        """
        return not self.has_ids and self.queries % TILE == 0

    # --- dS -----------------------------------------------------------------------------------------------------------

    def _write_ds(self, step: TileStep, ds, scratch):
        """Write this warpgroup's dS of a tile, which the next step passes on. ds: that of each half."""
        buffer = buffer_of(step.place)
        # For an item's first tile, _store of the item before has waited for the buffer, and stored from it.
        is_used = (step.number > 0) & (step.place > 1)
        pl.when(is_used)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[buffer]))
        pl.when(step.number == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))
        for half, x in enumerate(ds):
            (smem,) = at(scratch["ds_smem"], self.ds_index(buffer, step.warpgroup, half))
            smem[...] = x

    def _publish_ds(self, place, scratch):
        tiles.fence_shared_memory(self.interpret)
        plgpu.barrier_arrive(scratch["ds_ready"].at[buffer_of(place)])

    def _wait_for_ds(self, place, scratch):
        plgpu.barrier_wait(scratch["ds_ready"].at[buffer_of(place)])

    # --- dq -----------------------------------------------------------------------------------------------------------

    def _factors_of_dq(self, place, number, half, scratch):
        """Yield the factors of dq of half of a tile: dS, and the keys of the item with this number, per warpgroup."""
        buffer = buffer_of(place + 2)  # not negative
        for warpgroup in range(self.schedule.warpgroups):
            (ds,) = at(scratch["ds_smem"], self.ds_index(buffer, warpgroup, half))
            yield transposed(ds), self._keys_at(number + self.schedule.buffers, warpgroup, scratch)

    def _multiply_dq(self, place, number, half, scratch):
        self._wait_for_ds(place, scratch)
        products = [(0, a, b) for a, b in self._factors_of_dq(place, number, half, scratch)]
        (dq,) = tiles.accumulated((filled((ROWS, ROWS), 0, WGMMA),), products, self.interpret)
        return dq

    def _complete_dq(self, item, tile, dq, half, scratch):
        """Add the other items' sums to half of a tile's dq; write it for the warpgroup that has it stored."""
        self.write_total(self.total_of(dq, half, scratch), item, tile, half, scratch)
        self.release_sums(scratch)

    def _complete_last_dq(self, item, dq, half, refs, scratch):
        """Do what _complete_dq does for a sequence's last tile, which may reach past the sequence's end."""
        tile, total = item.steps - 1, self.total_of(dq, half, scratch)

        def store_all():
            self.write_total(total, item, tile, half, scratch)

        def store_first():
            q_head, *_ = self.heads_of(item)
            first, record = item.row + tile * TILE + half * ROWS, self._record(item, 2 * tile + half, refs)
            rows = refs["dq"].at[item.batch, :, q_head]
            store_first_rows(rows, (total,), first, record, COUNT, self.interpret)

        self.store_rows_of(self.rows_of(item, tile * TILE + half * ROWS), store_all, store_first)
        self.release_sums(scratch)

    def _finish_sequence(self, item, warpgroup, refs, scratch):
        """Complete dq of the last tile of a sequence, whose last item this is."""
        place = item.streamed + item.steps - 1
        self.publish_dq(warpgroup, scratch)  # of the last tile but one
        self._publish_ds(place, scratch)
        dq = self._multiply_dq(place, item.number, warpgroup, scratch)
        self._complete_last_dq(item, dq, warpgroup, refs, scratch)
        self.publish_dq(warpgroup, scratch)
        self._release_own(item.number, scratch)


def _item_before(step: TileStep):
    """Return the number of the item that the tile before this step's streamed past."""
    return step.item.number - (step.number == 0).astype(jnp.int32)


def _half(x, half: int):
    """Return the columns of half of a tile."""
    return x[:, half * ROWS : min((half + 1) * ROWS, x.shape[1])]


def _rows(part, half: int):
    return part.at[pl.ds(half * ROWS, ROWS)]
