"""The forward kernel of `pallas_flash` on Hopper for 129 to 256 queries and keys.

A persistent thread block loops over heads. A loader warpgroup requests the next head's queries, keys and values while
the compute warpgroups, 64 queries each, process the current head; shared memory holds both.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.tiles import BY_COLUMN, BY_ROW, ROWS, at

BUFFERS = 2  # for heads
LOADER_REGISTERS = 32  # per thread


class ShortForward(tiles.PerHeadKernel, Forward):
    """The forward kernel for non-causal calls. Tiles have 64 rows; rows beyond the last token load as zeros."""

    @property
    def query_tiles(self) -> int:
        """Return the number of query tiles, one per compute warpgroup."""
        return pl.cdiv(self.queries, ROWS)

    @property
    def steps(self) -> int:
        """Return the number of key tiles."""
        return pl.cdiv(self.keys, ROWS)

    @property
    def registers(self) -> int:
        """Return the registers per thread of a compute warpgroup, from those allocated at launch."""
        at_launch = 65536 // (128 * (self.query_tiles + 1)) // 8 * 8
        return (at_launch * (self.query_tiles + 1) - LOADER_REGISTERS) // self.query_tiles // 8 * 8

    def __call__(self, q_BNHD, k_BMHD, v_BMHD, *extras):
        """Return out and log-sum-exp; see Forward. Ids are those of chunks at multiples of 64."""

        def head_tiles(count):
            return tiles.tile(ROWS, self.head_dim, jnp.dtype(self.dtype), count)

        scratch = {
            "q_smem": head_tiles(BUFFERS * self.query_tiles),
            "k_smem": head_tiles(BUFFERS * self.steps),
            "v_smem": head_tiles(BUFFERS * self.steps),
            "out_smem": head_tiles(self.query_tiles),
            "arrived": plgpu.Barrier(
                num_arrivals=self.copies * (self.query_tiles + 2 * self.steps) + self.has_ids, num_barriers=BUFFERS
            ),
            "consumed": plgpu.Barrier(num_arrivals=self.query_tiles, num_barriers=BUFFERS),
        }
        if self.has_ids:
            scratch["k_ids_smem"] = plgpu.SMEM((BUFFERS, self.steps * ROWS), jnp.int32)
        outputs = self.rows(self.queries, self.heads), self.vector()
        kernel = self.launch(self._body, {"block": self.blocks}, self.query_tiles + 1, outputs, scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, *extras)

    def _body(self, q_ref, k_ref, v_ref, *refs, **scratch):
        scratch["bias_ref"], scratch["ids"], (out_ref, lse_ref) = self.extras(refs)
        warpgroup = lax.axis_index("warpgroup")
        iterations = self.iterations()

        @pl.when(warpgroup < self.query_tiles)
        def _():
            plgpu.set_max_registers(self.registers, action="increase")
            lax.fori_loop(0, iterations, lambda iteration, _: self._attend(iteration, out_ref, lse_ref, scratch), None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.query_tiles)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            @pl.loop(0, iterations + BUFFERS)  # the last iterations only wait for the last reads
            def _(iteration):
                buffer = lax.rem(iteration, BUFFERS)
                pl.when(iteration >= BUFFERS)(lambda: plgpu.barrier_wait(scratch["consumed"].at[buffer]))
                pl.when(iteration < iterations)(lambda: self._load(iteration, buffer, (q_ref, k_ref, v_ref), scratch))

    def _load(self, iteration, buffer, refs, scratch):
        batch, head = self.head_of(iteration)
        arrived = scratch["arrived"].at[buffer]
        if self.has_ids:
            of_keys = scratch["ids"][1].at[batch, pl.ds(0, self.steps * ROWS)]
            plgpu.copy_gmem_to_smem(of_keys, scratch["k_ids_smem"].at[buffer], arrived)
        counts = self.query_tiles, self.steps, self.steps
        for ref, first, name, count in zip(refs, self.first_heads, "qkv", counts, strict=True):
            for tile in range(count):
                smem, slot = scratch[f"{name}_smem"], buffer * count + tile
                tiles.load_rows(ref, batch, tile * ROWS, first + head, smem, slot, arrived, self.interpret)

    def _attend(self, iteration, out_ref, lse_ref, scratch):
        buffer, tile = lax.rem(iteration, BUFFERS), lax.axis_index("warpgroup")
        batch, head = self.head_of(iteration)

        def bias_of(step):
            return self.bias_tile(scratch["bias_ref"], batch, head, tile * ROWS, step * ROWS, self._columns(step))

        carry, bias, ids = self.initial_carry(), bias_of(0), None
        if self.has_ids:  # from device memory: at 256 tokens, shared memory has no room for them
            of_queries = scratch["ids"][0].at[batch, pl.ds(tile * ROWS, ROWS)]
            ids = plgpu.load(of_queries, layout=BY_ROW, optimized=False)
        plgpu.barrier_wait(scratch["arrived"].at[buffer])
        q = at(scratch["q_smem"], buffer * self.query_tiles + tile)
        for step in range(self.steps):
            carry, bias = self._add(step, buffer, q, ids, carry, bias, bias_of, scratch)
        plgpu.barrier_arrive(scratch["consumed"].at[buffer])
        out, lse = self.finalize(*carry)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the previous head was stored
        for part, x in zip(at(scratch["out_smem"], tile), out, strict=True):
            part[...] = x.astype(part.dtype)
        lse_ref.at[batch, head, pl.ds(tile * ROWS, ROWS)][...] = lse
        plgpu.commit_smem()
        tiles.store_rows(scratch["out_smem"], tile, out_ref, batch, tile * ROWS, head, self.interpret)

    def _keys(self, step: int) -> int:
        return min(ROWS, self.keys - step * ROWS)

    def _columns(self, step: int) -> int:
        """Return the columns of a tile's scores."""
        return tiles.padded_columns(self._keys(step))

    def _add(self, step, buffer, q, ids, carry, bias, bias_of, scratch):
        """Fold one tile of keys into the running output, maximum and sum; return also the next tile's bias."""
        slot = buffer * self.steps + step
        k, v = at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)
        k = tiles.first_rows(k, self._columns(step))
        (scores,) = tiles.products((bias, q, k), interpret=self.interpret)
        keep = None
        if ids is not None:
            where = buffer, pl.ds(step * ROWS, self._columns(step))
            keep = tiles.same_id(ids, plgpu.load(scratch["k_ids_smem"].at[where], layout=BY_COLUMN))
        weights, out, highest, total = self.softmax_step(scores, 0, step * ROWS, self._keys(step), carry, keep)
        # Requested before the product with values, which hides part of its latency; before the weights are computed,
        # it would exceed the registers.
        bias = bias_of(step + 1) if step + 1 < self.steps else None
        out = tiles.accumulated(out, [(i, weights, part) for i, part in enumerate(v)], self.interpret)
        return (out, highest, total), bias
