"""One backward kernel for dq, dk and dv of `pallas_flash` on Hopper, for at most 256 queries and 256 keys.

A thread block stays on its multiprocessor and goes through many heads. All that a head needs lies in shared memory, so
scores and weights are calculated once, and each array crosses the memory bus once. Two warpgroups own half of the keys
each: they keep dk and dv in registers and go through the queries, 64 at a time. They hand dS over to a third one, which
multiplies it with all keys to dq, sums up dO O before, and loads what the next head needs wherever room becomes free.
Nothing is added atomically: results are the same bits every time.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles as parts
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

REGISTERS = 208, 88  # per thread of a computing warpgroup and of the helper: 2 * 208 + 88 = 3 * 168
ROOMS = 2  # for tiles of O, and of dS


class ShortBackward(parts.ByHead):
    """The kernel; not for causal calls. Tiles are of 64 rows; those beyond the last token come in as zeros."""

    @property
    def steps(self) -> int:
        """Tiles of queries."""
        return pl.cdiv(self.queries, ROWS)

    @property
    def own(self) -> int:
        """Tiles of keys of each computing warpgroup."""
        return pl.cdiv(self.keys, 2 * ROWS)

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN):
        """dq, dk and dv in arrays like q's, k's and v's."""
        queries, keys, dtype = self.steps, 2 * self.own, jnp.dtype(self.dtype)

        def tiles(count):
            return parts.tile(ROWS, self.head_dim, dtype, count)

        scratch = {
            "q_smem": tiles(queries),
            "do_smem": tiles(queries),
            "out_smem": tiles(ROOMS),
            "k_smem": tiles(keys),
            "v_smem": tiles(keys),
            "ds_smem": parts.tile(ROWS, ROWS, dtype, ROOMS * keys),  # transposed; dv and dk leave through it
            "dq_smem": tiles(1),
            "lse_smem": plgpu.SMEM((queries, ROWS), jnp.float32),
            "delta_smem": plgpu.SMEM((queries, ROWS), jnp.float32),
            "q_arrived": plgpu.Barrier(num_arrivals=2 * self.copies + 1, num_barriers=queries),  # dO and lse, too
            "out_arrived": plgpu.Barrier(num_arrivals=self.copies, num_barriers=queries),
            "keys_arrived": plgpu.Barrier(num_arrivals=2 * self.copies * keys),
            "delta_ready": plgpu.Barrier(num_arrivals=1, num_barriers=queries),
            "ds_ready": plgpu.Barrier(num_arrivals=2, num_barriers=ROOMS),
            "ds_consumed": plgpu.Barrier(num_arrivals=1, num_barriers=ROOMS),
            "q_consumed": plgpu.Barrier(num_arrivals=2, num_barriers=queries),
            "v_consumed": plgpu.Barrier(num_arrivals=2),
        }
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        kernel = self.launch(self._body, {"block": self.blocks}, 3, (q, k, k), scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN)

    def _body(self, q, k, v, out, do, lse, dq, dk, dv, **scratch):
        refs = {"q": q, "k": k, "v": v, "out": out, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
        warpgroup = lax.axis_index("warpgroup")
        turns = self.turns()

        @pl.when(warpgroup < 2)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            lax.fori_loop(0, turns, lambda turn, _: self._compute(turn, refs, scratch), None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self._load_first(refs, scratch)
            lax.fori_loop(0, turns, lambda turn, _: self._help(turn, turns, refs, scratch), None)
            plgpu.wait_smem_to_gmem(0)

    # --- loads and stores ---------------------------------------------------------------------------------------------

    def _load(self, turn, name, tile, room, barrier, refs, scratch):
        batch, head = self.head_of(turn)
        if name in "qkv":
            head = head + self.first_heads["qkv".index(name)]
        parts.load_rows(refs[name], batch, tile * ROWS, head, scratch[f"{name}_smem"], room, barrier, self.interpret)

    def _load_keys(self, turn, name, refs, scratch):
        for tile in range(2 * self.own):
            self._load(turn, name, tile, tile, scratch["keys_arrived"], refs, scratch)

    def _load_queries(self, turn, tile, refs, scratch):
        arrived = scratch["q_arrived"].at[tile]
        for name in ("q", "do"):
            self._load(turn, name, tile, tile, arrived, refs, scratch)
        source = refs["lse"].at[(*self.head_of(turn), pl.ds(tile * ROWS, ROWS))]
        plgpu.copy_gmem_to_smem(source, scratch["lse_smem"].at[tile], arrived)

    def _load_out(self, turn, tile, refs, scratch):
        self._load(turn, "out", tile, lax.rem(tile, ROOMS), scratch["out_arrived"].at[tile], refs, scratch)

    def _load_first_out(self, turn, refs, scratch):
        for tile in range(min(ROOMS, self.steps)):
            self._load_out(turn, jnp.int32(tile), refs, scratch)

    def _load_first(self, refs, scratch):
        turn = jnp.int32(0)
        self._load_keys(turn, "k", refs, scratch)
        self._load_keys(turn, "v", refs, scratch)
        for tile in range(self.steps):
            self._load_queries(turn, tile, refs, scratch)
        self._load_first_out(turn, refs, scratch)

    def _store(self, turn, name, values, scale, first_tile, smem, room, refs):
        """Starts storing `values`, one after the other, through smem's tiles from `room` on."""
        for i, value in enumerate(values):
            for part, x in zip(at(smem, room + i), value, strict=True):
                part[...] = (x * scale).astype(part.dtype)
        plgpu.commit_smem()
        batch, head = self.head_of(turn)
        head = head + self.first_heads[("dq", "dk", "dv").index(name)]
        for i in range(len(values)):
            parts.store_rows(smem, room + i, refs[name], batch, (first_tile + i) * ROWS, head, self.interpret)

    # --- the helper: delta = rowsum(dO O), dq, and all loads ----------------------------------------------------------

    def _help(self, turn, turns, refs, scratch):
        lax.fori_loop(0, self.steps, lambda tile, _: self._delta(turn, tile, refs, scratch), None)
        plgpu.barrier_wait(scratch["keys_arrived"])
        more = turn + 1 < turns

        def dq_of(tile, _):
            room = lax.rem(tile, ROOMS)
            last = tile == self.steps - 1
            plgpu.barrier_wait(scratch["ds_ready"].at[room])

            @pl.when(last)
            def _():
                plgpu.barrier_wait(scratch["v_consumed"])
                pl.when(more)(lambda: self._load_keys(turn + 1, "v", refs, scratch))

            dq = self._dq(room, scratch)
            plgpu.barrier_arrive(scratch["ds_consumed"].at[room])

            @pl.when(last & more)
            def _():
                self._load_keys(turn + 1, "k", refs, scratch)
                self._load_first_out(turn + 1, refs, scratch)

            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            self._store(turn, "dq", [dq], self.scale, tile, scratch["dq_smem"], 0, refs)
            pl.when(tile > 0)(lambda: self._next_queries(turn, tile - 1, more, refs, scratch))

        lax.fori_loop(0, self.steps, dq_of, None)
        self._next_queries(turn, self.steps - 1, more, refs, scratch)

    def _next_queries(self, turn, tile, more, refs, scratch):
        plgpu.barrier_wait(scratch["q_consumed"].at[tile])
        pl.when(more)(lambda: self._load_queries(turn + 1, tile, refs, scratch))

    def _delta(self, turn, tile, refs, scratch):
        plgpu.barrier_wait(scratch["q_arrived"].at[tile])
        plgpu.barrier_wait(scratch["out_arrived"].at[tile])
        pairs = zip(at(scratch["do_smem"], tile), at(scratch["out_smem"], lax.rem(tile, ROOMS)), strict=True)
        scratch["delta_smem"].at[tile][...] = sum(row_sums(x, y) for x, y in pairs)
        plgpu.barrier_arrive(scratch["delta_ready"].at[tile])
        plgpu.commit_smem()  # all four warps have read O
        pl.when(tile + ROOMS < self.steps)(lambda: self._load_out(turn, tile + ROOMS, refs, scratch))

    def _dq(self, room, scratch):
        keys = 2 * self.own
        zero = self._fresh(0)
        k = [at(scratch["k_smem"], zero + tile) for tile in range(keys)]
        ds = [at(scratch["ds_smem"], room * keys + tile)[0] for tile in range(keys)]
        products = [(i, transposed(ds[tile]), part) for tile in range(keys) for i, part in enumerate(k[tile])]
        return parts.accumulated(self.zeros(), products, self.interpret)

    # --- the computing warpgroups: dS, dk, dv -------------------------------------------------------------------------

    def _compute(self, turn, refs, scratch):
        zeros = tuple(self.zeros() for _ in range(self.own))
        plgpu.barrier_wait(scratch["keys_arrived"])
        whole, last = divmod(self.queries, ROWS)
        if parts.narrow(last) == ROWS:
            whole, last = whole + 1, 0
        carry = zeros, zeros
        # An end that the compiler does not know, and nothing of the last tile before it: else registers spill.
        carry = lax.fori_loop(0, self._fresh(whole), lambda tile, c: self._step(tile, ROWS, *c, scratch), carry)
        if last:
            tile, carry = self._after((jnp.int32(whole), carry))
            carry = self._step(tile, parts.narrow(last), *carry, scratch)
        dk, dv = carry
        first = lax.axis_index("warpgroup") * self.own
        for tile in range(max(0, self.steps - ROOMS), self.steps):
            plgpu.barrier_wait(scratch["ds_consumed"].at[tile % ROOMS])
        self._store(turn, "dv", dv, 1, first, scratch["ds_smem"], first, refs)
        self._store(turn, "dk", dk, self.scale, first, scratch["ds_smem"], 2 * self.own + first, refs)

    def _step(self, tile, columns, dk, dv, scratch):
        """The first `columns` queries of a tile. Scores and all of their size are keys by queries."""
        dk, dv = list(dk), list(dv)
        first = self._fresh(lax.axis_index("warpgroup")) * self.own
        room = lax.rem(tile, ROOMS)
        plgpu.barrier_wait(scratch["q_arrived"].at[tile])
        q, do = at(scratch["q_smem"], tile), at(scratch["do_smem"], tile)
        some_q, some_do = parts.first_rows(q, columns), parts.first_rows(do, columns)
        none = filled((ROWS, columns), 0, WGMMA)
        (scores,) = parts.accumulated((none,), self._scores(0, first, some_q, scratch), self.interpret)
        for i in range(self.own):
            last = i == self.own - 1
            weights = self._weights(scores, tile, self._has_padding(i), scratch)
            v = at(scratch["v_smem"], first + i)
            products = [(0, x, transposed(y)) for x, y in zip(v, some_do, strict=True)]
            products += [(1 + j, parts.widened(weights), part) for j, part in enumerate(do)]
            dp, *dv_i = parts.accumulated((none, *dv[i]), products, self.interpret)
            dv[i] = tuple(dv_i)
            if i == 0:
                self._wait_for_room(tile, room, scratch)
            if last:
                pl.when(tile == self.steps - 1)(lambda: plgpu.barrier_arrive(scratch["v_consumed"]))
            ds = parts.widened(self._ds(weights, dp, tile, scratch))
            at(scratch["ds_smem"], room * 2 * self.own + first + i)[0][...] = ds
            products = [(j, ds, part) for j, part in enumerate(q)]
            if last:
                plgpu.commit_smem()
                plgpu.barrier_arrive(scratch["ds_ready"].at[room])
                dk[i] = parts.accumulated(dk[i], products, self.interpret)
            else:
                products += self._scores(len(q), first + i + 1, some_q, scratch)
                *dk_i, scores = parts.accumulated((*dk[i], none), products, self.interpret)
                dk[i] = tuple(dk_i)
        plgpu.barrier_arrive(scratch["q_consumed"].at[tile])
        return tuple(dk), tuple(dv)

    def _scores(self, index, k_tile, q, scratch) -> list:
        return [(index, x, transposed(y)) for x, y in zip(at(scratch["k_smem"], k_tile), q, strict=True)]

    def _has_padding(self, own_tile: int) -> bool:
        """Whether either computing warpgroup's tile of that number has rows beyond the last key."""
        return any((warpgroup * self.own + own_tile + 1) * ROWS > self.keys for warpgroup in (0, 1))

    def _weights(self, scores, tile, has_padding, scratch):
        scores, tile = self._after((scores, tile))
        lse = plgpu.load(scratch["lse_smem"].at[tile, pl.ds(0, scores.shape[1])], layout=BY_COLUMN)
        exponents = scores * (self.scale * LOG2E) - along_columns(lse, scores.shape)
        if has_padding:  # whose scores are 0: far above a low lse, and infinity times dq's zero rows of k is no number
            exponents = jnp.minimum(exponents, 0.0)
        return jnp.exp2(exponents).astype(self.dtype)

    def _ds(self, weights, dp, tile, scratch):
        """From rounded weights: a second copy in float32 would not fit into the registers."""
        weights, dp, tile = self._after((weights, dp, tile))
        delta = plgpu.load(scratch["delta_smem"].at[tile, pl.ds(0, dp.shape[1])], layout=BY_COLUMN)
        return (weights.astype(jnp.float32) * (dp - along_columns(delta, dp.shape))).astype(self.dtype)

    def _wait_for_room(self, tile, room, scratch):
        """Until delta is there, and the room of dS free: of an earlier tile's, or of the dk and dv before."""
        plgpu.barrier_wait(scratch["delta_ready"].at[tile])
        pl.when(tile >= ROOMS)(lambda: plgpu.barrier_wait(scratch["ds_consumed"].at[room]))
        pl.when(tile == 0)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    # --- what keeps the compiler from filling the registers too early -------------------------------------------------

    def _after(self, values: tuple) -> tuple:
        """The values, none of them known to the compiler before all are. (The interpreter knows no such barrier.)"""
        return values if self.interpret else lax.optimization_barrier(values)

    def _fresh(self, index):
        """An index from which addresses have to be calculated anew, rather than all kept from loop to loop."""
        return index if self.interpret else lax.optimization_barrier(jnp.int32(index))
