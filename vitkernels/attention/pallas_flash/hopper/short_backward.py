"""One backward kernel for dq, dk and dv of `pallas_flash` on Hopper, for at most 256 queries and 256 keys, or quads.

Persistent thread blocks loop over heads. Shared memory holds q, dO, k and v of a head, so scores and weights are
computed once, and device memory is read once; dO is read a second time, from the L2 cache. Up to four warpgroups
process a head. Each owns a tile of 64 keys, one of 64 queries, or both. It keeps dk and dv of its keys in registers,
loops over the tiles of queries, and passes dS to the others through shared memory. Once it has processed the tile after
its own queries, it multiplies their dS with all keys to get dq. It also requests its rows of the next head as buffers
become free, and computes rowsum(dO O) of its queries. No sum uses atomics, so results are bit-equal from run to run.

Of heads with one or two tiles, a thread block processes four or two at a time.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups, tiles
from vitkernels.attention.pallas_flash.hopper.chunks import QUAD_COUNT, QUAD_END, QUAD_FIRST
from vitkernels.attention.pallas_flash.hopper.head_rows import HeadRows
from vitkernels.attention.pallas_flash.hopper.per_head import NARROW, WARPGROUPS, PerHeadKernel
from vitkernels.attention.pallas_flash.hopper.schedule import fits
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

BUFFERS = 2  # for dS
WIDEST_NARROW_TILE = 32  # columns; wider last tiles count as full


@dataclass(frozen=True)
class ShortBackward(PerHeadKernel):
    """The backward kernel for non-causal calls. Rows of tiles past the last token load as zeros."""

    stores_ds: bool = False  # the kernel also returns dS, transposed

    @property
    def per_head(self) -> int:
        """Return the number of warpgroups that process a head."""
        return max(self.query_tiles, self.key_tiles)

    @property
    def warpgroups(self) -> int:
        return self.heads_at_once * self.per_head

    @property
    def copies_bias(self) -> bool:
        """Return whether each tile of a bias is copied to shared memory ahead; otherwise, it is loaded to registers."""
        return self.bias_shape is not None and fits(self._tiles, self.warpgroups, self.bias_bytes, self.has_ids)

    @property
    def key_buffers(self) -> int:
        """Return for how many heads shared memory holds keys."""
        biases = self.warpgroups if self.copies_bias else 0
        return 2 if fits(self._tiles + self.warpgroups, biases, self.bias_bytes, self.has_ids) else 1

    @property
    def _tiles(self) -> int:
        """Return the fewest tiles that a thread block needs: of q, dO, k, v and dS."""
        return (4 + BUFFERS) * self.warpgroups

    @property
    def ds(self) -> jax.ShapeDtypeStruct:
        """Return the array of dS, (B, H, M, N rounded up to 8), as the TMA unit requires rows of 16 n bytes."""
        shape = self.batch, self.heads, self.keys, tiles.padded_columns(self.queries)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.dtype))

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras):
        """Return dq, dk and dv in arrays like q's, k's and v's, and with stores_ds dS.

        extras: see Forward; the bias is transposed. The chunks of ids lie at multiples of 64, or form quads. Then the
            kernel writes only their rows.
        """
        count, dtype = self.warpgroups, jnp.dtype(self.dtype)

        def barrier(arrivals: int, count: int = count):
            return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)

        scratch = {
            **{f"{name}_smem": tiles.tile(ROWS, self.head_dim, dtype, count) for name in ("q", "do", "v")},
            "k_smem": tiles.tile(ROWS, self.head_dim, dtype, count * self.key_buffers),
            "lse_smem": plgpu.SMEM((count, ROWS), jnp.float32),
            "delta_smem": plgpu.SMEM((count, ROWS), jnp.float32),
            # dS, transposed. A warpgroup stores dq, dv and dk through its own slots.
            "ds_smem": tiles.tile(ROWS, ROWS, dtype, BUFFERS * count),
            "q_arrived": barrier(2 * self.copies + 1 + self.compares_ids),  # with dO, log-sum-exp and ids
            "k_arrived": barrier(self.copies + self.compares_ids),
            "v_arrived": barrier(self.copies),
            "delta_ready": barrier(1),
            "ds_ready": barrier(self.key_tiles),
            "q_consumed": barrier(self.key_tiles),
            "ds_consumed": barrier(1, BUFFERS * self.heads_at_once),
            **self.quad_scratch(),
            **(self.bias_scratch(count) if self.copies_bias else {}),
        }
        if self.compares_ids:
            scratch["q_ids_smem"] = plgpu.SMEM((count, ROWS), jnp.int32)
            scratch["k_ids_smem"] = plgpu.SMEM((count * self.key_buffers, ROWS), jnp.int32)
        q, k = self.rows(self.queries, self.all_heads), self.rows(self.keys, self.all_heads)
        outputs = (q, k, k, self.ds) if self.stores_ds else (q, k, k)
        kernel = self.launch(self._body, {"block": self.blocks}, count, outputs, scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN, *extras)

    def _body(self, q, k, v, out, do, lse, *rest, **scratch):
        bias, ids, (dq, dk, dv, *ds) = self.extras(rest)
        refs = {"q": q, "k": k, "v": v, "out": out, "do": do, "lse": lse, "dq": dq, "dk": dk, "dv": dv, "bias": bias}
        refs |= {"ds": ds[0] if ds else None, "ids": ids}
        warpgroup = lax.axis_index("warpgroup")
        iterations = self.iterations(ids, self.group_of(warpgroup))
        if self.bias_shape or self.has_ids:  # of a loop that the compiler knows to run once, registers spill
            iterations = self.opaque(iterations)
        head_of = lambda iteration: _Head(self, refs, scratch, warpgroup, iteration, iterations)  # noqa: E731
        pl.when(iterations > 0)(lambda: head_of(jnp.int32(-1)).request_first())
        lax.fori_loop(0, iterations, lambda i, _: head_of(i).process(), None)
        plgpu.wait_smem_to_gmem(0)

    def group_of(self, warpgroup):
        """Return the number of a warpgroup's group, which processes a head."""
        return 0 if self.heads_at_once == 1 else lax.div(warpgroup, self.per_head)


class _Head(HeadRows):
    """What a warpgroup computes for one head."""

    def process(self) -> None:
        kernel = self.kernel
        if kernel.has_quads:
            self.request_place(2)
            pl.when(self.more)(lambda: kernel.wait_for_place(self.iteration + 1, self.scratch))
        self.if_owns(kernel.key_tiles, self._process_queries)
        if kernel.key_tiles < kernel.per_head:

            @pl.when(self.own >= kernel.key_tiles)
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head's dq
                pl.when(self.more)(self.prefetch_factors)
                self._compute_dq()
                pl.when(self.more)(lambda: self.put_delta(self.load_factors()))

    def _process_queries(self) -> None:
        """Compute the own dk and dv, and dq in between."""
        kernel, own = self.kernel, self.own
        self.if_owns(kernel.query_tiles, lambda: pl.when(self.more)(self.prefetch_factors))
        plgpu.barrier_wait(self.barrier("k_arrived", own))
        if kernel.key_buffers == 2:
            pl.when(self.more)(self.request_keys)
        full, last = divmod(kernel.queries_at_once, ROWS)
        if tiles.padded_columns(last) > WIDEST_NARROW_TILE:
            full, last = full + 1, 0
        # Hide the loop's end from the compiler, and keep the last tile's code behind it; otherwise registers spill.
        sums = lax.fori_loop(0, kernel.opaque(full), self._step, (kernel.zeros(), kernel.zeros()))
        if last:
            tile, sums = self._sequenced((jnp.int32(full), sums))
            sums = self._step(tile, sums, tiles.padded_columns(last))
        self._finish(*sums)

    def _finish(self, dk, dv) -> None:
        """Compute dq of the last queries; store dk and dv; compute delta of the next head."""
        kernel, own = self.kernel, self.own
        last = kernel.query_tiles - 1
        if last < kernel.key_tiles:
            pl.when(own == last)(self._compute_dq)
        factors = self.load_factors()  # early, as they take some time to arrive
        if last > 0:
            plgpu.barrier_wait(self._ds_consumed((last - 1) % BUFFERS))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dq
        self._store("dv", dv, 1, (last + 1) % BUFFERS)
        self.if_owns(kernel.query_tiles, lambda: pl.when(self.more)(lambda: self.put_delta(factors)))
        plgpu.barrier_wait(self._ds_consumed(last % BUFFERS))
        if kernel.key_buffers == 1:
            pl.when(self.more)(self.request_keys)
        self._store("dk", dk, kernel.scale, last % BUFFERS)

    def _slot(self, buffer, key_tile):
        """Return the index in shared memory of a tile of dS."""
        return buffer * self.kernel.warpgroups + self.index(key_tile)

    def _ds_consumed(self, buffer):
        return self.scratch["ds_consumed"].at[self.group * BUFFERS + buffer]

    def _store(self, name: str, values: tuple, scale: float, buffer) -> None:
        """Start storing a gradient of the own tile, through the own slot for dS in a buffer."""
        kernel, place, own = self.kernel, self.place(), self.own
        head = place.head + kernel.first_heads[("dq", "dk", "dv").index(name)]
        scaled = tuple(x * scale for x in values)
        kernel.store_tiles(
            self.scratch["ds_smem"], self._slot(buffer, own), [scaled], self.refs[name], place, head, own
        )

    def _step(self, tile, sums, columns: int = ROWS) -> tuple:
        """Process a tile of queries, or its first `columns`. Scores and arrays of their size are keys by queries."""
        if not self.kernel.has_quads:
            return self._add(tile, columns, sums)
        place, own = self.place(), self.own
        absolute = tile + place.of_chunk(0, QUAD_FIRST)
        is_needed = (place.of_chunk(own, QUAD_FIRST) <= absolute) & (absolute < place.of_chunk(own, QUAD_END))
        is_wide = place.of_chunk(tile, QUAD_COUNT) > NARROW
        ways = partial(self._skip, tile), partial(self._add, tile, NARROW), partial(self._add, tile, ROWS)
        return lax.switch(jnp.where(is_needed, 1 + is_wide.astype(jnp.int32), 0), ways, sums)

    def _skip(self, tile, sums) -> tuple:
        """Pass zeros on as dS of a tile of queries that attend to none of the own keys."""
        plgpu.barrier_wait(self.barrier("q_arrived", tile))
        plgpu.barrier_wait(self.barrier("delta_ready", tile))
        self._wait_for_values(tile)
        self._wait_for_slot(tile)
        self._put_ds(filled((ROWS, ROWS), 0, WGMMA, jnp.dtype(self.kernel.dtype)), tile)
        self._end_step(tile)
        return sums

    def _add(self, tile, columns: int, sums) -> tuple:
        dk, dv = sums
        plgpu.barrier_wait(self.barrier("q_arrived", tile))
        q, do = self.smem("q", tile), self.smem("do", tile)
        weights = self._weights(q, tile, columns)
        plgpu.barrier_wait(self.barrier("delta_ready", tile))
        dv, ds, tile = self._ds(weights, do, dv, tile)
        products = [(j, ds, part) for j, part in enumerate(q)]
        dk = tiles.accumulated(dk, products, self.kernel.interpret, meanwhile=lambda: self._put_ds(ds, tile))
        self._end_step(tile)
        return tuple(dk), dv

    def _weights(self, q, tile, columns: int):
        """Return the weights of the own keys, for the first `columns` queries of a tile."""
        kernel = self.kernel
        k = self.k(self.own)
        products = [(0, x, transposed(y)) for x, y in zip(k, tiles.first_rows(q, columns), strict=True)]
        load_lse = partial(self._along_columns, "lse", tile, columns)
        # Before the product, which hides the latency, but not with a bias or ids: that takes longer.
        lse = None if kernel.bias_shape or kernel.compares_ids else load_lse()
        (scores,) = tiles.accumulated((self._start(tile, columns),), products, kernel.interpret)
        self.request_next_bias(tile)
        scores, tile = self._sequenced((scores, tile))
        exponents = kernel.exponents(scores) - (load_lse() if lse is None else lse)
        # Rows past the last key have scores of 0, maybe far above a low lse: exp2 would overflow, and inf * 0 is NaN. A
        # bias of -inf, another id or what the scores of a quad start from prevents this.
        if kernel.compares_ids:
            of_keys = plgpu.load(self.own_key_ids(), layout=BY_ROW)
            of_queries = plgpu.load(self.vector("q_ids", tile).at[pl.ds(0, columns)], layout=BY_COLUMN)
            exponents = jnp.where(tiles.same_id(of_keys, of_queries), exponents, -jnp.inf)
        elif kernel.keys_at_once % ROWS and kernel.bias_shape is None:
            exponents = jnp.minimum(exponents, 0.0)
        return jnp.exp2(exponents).astype(kernel.dtype)

    def _along_columns(self, name: str, tile, columns: int, first: int = 0):
        """Return log-sum-exp or delta of some queries of a tile."""
        some = self.vector(name, tile).at[pl.ds(first, columns)]
        return along_columns(plgpu.load(some, layout=BY_COLUMN), (ROWS, columns))

    def _start(self, tile, columns: int):
        """Return what the scores start from.

        It is the bias. In quads, it is infinitely low for keys past a segment's end; queries past it have a log-sum-exp
        of infinity.
        """
        kernel, shape = self.kernel, (ROWS, columns)
        if kernel.copies_bias:
            return kernel.copied_bias(lax.axis_index("warpgroup"), columns, self.scratch)
        if kernel.bias_shape is not None:
            return groups.load(self.bias(self.place(), tile, columns), kernel.interpret)
        if not kernel.has_quads:
            return filled(shape, 0, WGMMA)
        keys = self.place().of_chunk(self.own, QUAD_COUNT)
        return along_rows(jnp.where(tiles.row_numbers() < keys, 0.0, kernel.lowest_product), shape)

    def _ds(self, weights, do, dv, tile) -> tuple:
        """Return dv with what a tile of queries adds, dS, and the tile.

        dS comes from the rounded weights; a second copy in float32 would exceed the registers. With four warpgroups, dP
        of 64 queries would exceed them, too, and ptxas would serialize the products (C7512). So it is computed in
        halves.
        """
        kernel, columns = self.kernel, weights.shape[1]
        v = self.smem("v", self.own)
        parts = 2 if kernel.warpgroups == WARPGROUPS and columns == ROWS else 1
        width, found = columns // parts, []
        weights, tile = self._sequenced((weights, tile))
        self._wait_for_values(tile)
        for part in range(parts):
            first = part * width
            some_do = tiles.first_rows(do, width) if part == 0 else tuple(x.at[pl.ds(first, width)] for x in do)
            products = [(0, x, transposed(y)) for x, y in zip(v, some_do, strict=True)]
            zeros = filled((ROWS, width), 0, WGMMA)
            if part == 0:
                products += [(1 + j, tiles.widened(weights), x) for j, x in enumerate(do)]
                dp, *dv = tiles.accumulated((zeros, *dv), products, kernel.interpret)
                self._wait_for_slot(tile)
            else:
                (dp,) = tiles.accumulated((zeros,), products, kernel.interpret)
            some_weights = weights if parts == 1 else lax.slice(weights, (0, first), (ROWS, first + width))
            some_weights, dp, tile = self._sequenced((some_weights, dp, tile))
            ds = some_weights.astype(jnp.float32) * (dp - self._along_columns("delta", tile, width, first))
            found.append(ds.astype(kernel.dtype))
        ds = found[0] if parts == 1 else jnp.concatenate(found, axis=1)
        return tuple(dv), tiles.widened(ds), tile

    def _wait_for_values(self, tile) -> None:
        """Wait for the head's values at its first tile: not earlier, since the scores do not need them."""
        pl.when(tile == 0)(lambda: plgpu.barrier_wait(self.barrier("v_arrived", self.own)))

    def _wait_for_slot(self, tile) -> None:
        """Wait until the own slot for dS is free of an earlier tile's dS, the previous head's dv and dk, and dq."""
        pl.when(tile >= BUFFERS)(lambda: plgpu.barrier_wait(self._ds_consumed(lax.rem(tile, BUFFERS))))
        was_stored = (tile == 0) | (tile == self.own + BUFFERS)  # dq, after tile own + 1
        pl.when(was_stored)(lambda: plgpu.wait_smem_to_gmem(0, wait_read_only=True))

    def _put_ds(self, ds, tile) -> None:
        """Store dS and announce it, each thread behind a fence for its own part."""
        slot = self._slot(lax.rem(tile, BUFFERS), self.own)
        at(self.scratch["ds_smem"], slot)[0][...] = ds
        tiles.fence_shared_memory(self.kernel.interpret)
        plgpu.barrier_arrive(self.barrier("ds_ready", tile))

    def _end_step(self, tile) -> None:
        """Release a tile of queries. After the last, request the next head's values; after tile own + 1, compute dq."""
        plgpu.barrier_arrive(self.barrier("q_consumed", tile))
        pl.when((tile == self.kernel.query_tiles - 1) & self.more)(lambda: self.request("v"))
        pl.when(tile == self.own + 1)(self._compute_dq)

    def _compute_dq(self) -> None:
        """Compute and start storing dq of the own queries; request those of the next head."""
        kernel = self.kernel
        tile, zero = self.own, kernel.opaque(0)
        buffer, products = lax.rem(tile, BUFFERS), []
        plgpu.barrier_wait(self.barrier("ds_ready", tile))
        if kernel.stores_ds:
            self._store_ds(tile, buffer)
        for i in range(kernel.key_tiles):
            (ds,) = at(self.scratch["ds_smem"], self._slot(buffer, zero + i))
            products += [(j, transposed(ds), part) for j, part in enumerate(self.k(zero + i))]
        dq = tiles.accumulated(kernel.zeros(), products, kernel.interpret)
        if kernel.stores_ds:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self._ds_consumed(buffer))
        self._store("dq", dq, kernel.scale, buffer)
        plgpu.barrier_wait(self.barrier("q_consumed", tile))
        pl.when(self.more)(self.request_queries)

    def _store_ds(self, tile, buffer) -> None:
        """Start storing dS of the own queries; the warpgroups have made it visible to the TMA unit."""
        kernel, place = self.kernel, self.place()
        columns = pl.ds(tiles.unchecked(tile * ROWS), ROWS)
        for key_tile in range(kernel.key_tiles):
            rows = pl.ds(tiles.unchecked(key_tile * ROWS), ROWS)
            smem = tiles.untiled(self.scratch["ds_smem"][0], self._slot(buffer, key_tile), kernel.interpret)
            plgpu.copy_smem_to_gmem(smem, self.refs["ds"].at[place.batch, place.head, rows, columns])

    # --- a barrier that limits register pressure ----------------------------------------------------------------------

    def _sequenced(self, values: tuple) -> tuple:
        """Return the values behind a barrier that makes each depend on all; the interpreter has no such barrier."""
        return values if self.kernel.interpret else lax.optimization_barrier(values)
