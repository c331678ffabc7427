"""The forward kernel of `pallas_flash` on Hopper for 129 to 256 queries and keys.

A thread block stays on its multiprocessor and goes through many heads. A warpgroup of its own requests the next head's
queries, keys and values while the others, 64 queries each, work on this one's; there is room for both.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles as parts
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, WGMMA, at, filled, transposed

ROOMS = 2  # for heads
LOADER_REGISTERS = 32  # per thread


class ShortForward(parts.ByHead, Forward):
    """The kernel; not for causal calls. Tiles are of 64 rows; those beyond the last token come in as zeros."""

    @property
    def tiles(self) -> int:
        """Tiles of queries, one for each computing warpgroup."""
        return pl.cdiv(self.queries, ROWS)

    @property
    def steps(self) -> int:
        """Tiles of keys."""
        return pl.cdiv(self.keys, ROWS)

    @property
    def registers(self) -> int:
        """Per thread of a computing warpgroup, from those that the launch gives to all."""
        at_launch = 65536 // (128 * (self.tiles + 1)) // 8 * 8
        return (at_launch * (self.tiles + 1) - LOADER_REGISTERS) // self.tiles // 8 * 8

    def __call__(self, q_BNHD, k_BMHD, v_BMHD):
        def tiles(count):
            return parts.tile(ROWS, self.head_dim, jnp.dtype(self.dtype), count)

        scratch = {
            "q_smem": tiles(ROOMS * self.tiles),
            "k_smem": tiles(ROOMS * self.steps),
            "v_smem": tiles(ROOMS * self.steps),
            "out_smem": tiles(self.tiles),
            "arrived": plgpu.Barrier(num_arrivals=self.copies * (self.tiles + 2 * self.steps), num_barriers=ROOMS),
            "consumed": plgpu.Barrier(num_arrivals=self.tiles, num_barriers=ROOMS),
        }
        outputs = self.rows(self.queries, self.heads), self.vector()
        kernel = self.launch(self._body, {"block": self.blocks}, self.tiles + 1, outputs, scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD)

    def _body(self, q_ref, k_ref, v_ref, out_ref, lse_ref, **scratch):
        warpgroup = lax.axis_index("warpgroup")
        turns = self.turns()

        @pl.when(warpgroup < self.tiles)
        def _():
            plgpu.set_max_registers(self.registers, action="increase")
            lax.fori_loop(0, turns, lambda turn, _: self._attend(turn, out_ref, lse_ref, scratch), None)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == self.tiles)
        def _():
            plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")

            @pl.loop(0, turns + ROOMS)  # the last turns only wait until all has been read
            def _(turn):
                room = lax.rem(turn, ROOMS)
                pl.when(turn >= ROOMS)(lambda: plgpu.barrier_wait(scratch["consumed"].at[room]))
                pl.when(turn < turns)(lambda: self._load(turn, room, (q_ref, k_ref, v_ref), scratch))

    def _load(self, turn, room, refs, scratch):
        batch, head = self.head_of(turn)
        arrived = scratch["arrived"].at[room]
        counts = self.tiles, self.steps, self.steps
        for ref, first, name, count in zip(refs, self.first_heads, "qkv", counts, strict=True):
            for tile in range(count):
                smem, slot = scratch[f"{name}_smem"], room * count + tile
                parts.load_rows(ref, batch, tile * ROWS, first + head, smem, slot, arrived, self.interpret)

    def _attend(self, turn, out_ref, lse_ref, scratch):
        room, tile = lax.rem(turn, ROOMS), lax.axis_index("warpgroup")
        batch, head = self.head_of(turn)
        plgpu.barrier_wait(scratch["arrived"].at[room])
        carry = self.start()
        for step in range(self.steps):
            carry = self._add(step, room, at(scratch["q_smem"], room * self.tiles + tile), carry, scratch)
        plgpu.barrier_arrive(scratch["consumed"].at[room])
        out, lse = self.finish(*carry)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the head before has left
        for part, x in zip(at(scratch["out_smem"], tile), out, strict=True):
            part[...] = x.astype(part.dtype)
        lse_ref.at[batch, head, pl.ds(tile * ROWS, ROWS)][...] = lse
        plgpu.commit_smem()
        parts.store_rows(scratch["out_smem"], tile, out_ref, batch, tile * ROWS, head, self.interpret)

    def _add(self, step, room, q, carry, scratch):
        """One tile of keys into the running output, maximum and sum."""
        keys, slot = min(ROWS, self.keys - step * ROWS), room * self.steps + step
        k, v = at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)
        columns = parts.narrow(keys)
        products = [(0, a, transposed(b)) for a, b in zip(q, parts.first_rows(k, columns), strict=True)]
        (scores,) = parts.accumulated((filled((ROWS, columns), 0, WGMMA),), products, self.interpret)
        weights, out, highest, total = self.weighed(scores, 0, step * ROWS, keys, carry)
        out = parts.accumulated(out, [(i, weights, part) for i, part in enumerate(v)], self.interpret)
        return out, highest, total
