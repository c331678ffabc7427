"""The backward kernel of `pallas_flash` on Hopper that computes dq, dk and dv of long sequences without masks."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.fused_kernel import DS_BUFFERS, FusedKernel
from vitkernels.attention.pallas_flash.hopper.tiles import ROWS, WGMMA, at, filled, transposed


class FusedBackward(FusedKernel):
    """The products, for head dims of one part of 64 columns: two warpgroups multiply dk and dv, and a helper dq."""

    group = 2
    registers = 200, 72, 40

    def _scratch(self):
        transforms = (plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128))
        return super()._scratch() | {
            "sum_smem": plgpu.SMEM((self.group, ROWS, 64), jnp.float32, transforms=transforms),
            "ds_consumed": plgpu.Barrier(num_arrivals=1, num_barriers=DS_BUFFERS),
        }

    def _hold(self, item, warpgroup, scratch):
        """Return K and V of the warpgroup's keys, in registers."""
        owner = self.owner(item.number, warpgroup)
        return tuple(plgpu.load(scratch[name].at[owner], layout=WGMMA) for name in ("k_smem", "v_smem"))

    def _add(self, item, step, dk, dv, held, warpgroup, refs, scratch):
        """Add a tile's products. dv's runs while dS is computed, and dP's while the weights are."""
        slot = self.slot(item, step)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        (q,), (do,) = at(scratch["q_smem"], slot), at(scratch["do_smem"], slot)
        k, v = held

        def chain(refs):
            scores_ref, dp_ref, dk_ref, dv_ref = refs
            plgpu.wgmma(scores_ref, k, transposed(q))
            plgpu.wgmma(dp_ref, v, transposed(do))
            weights = self._weights(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1), slot, scratch)
            plgpu.wgmma(dv_ref, weights.astype(self.dtype), do)
            dp = plgpu.wgmma_accumulator_load(dp_ref, wait_n=1)
            plgpu.wgmma(dk_ref, self._pass_ds(item, step, weights, dp, slot, warpgroup, scratch), q)

        if self.interpret:
            scores, dp = (jnp.dot(a, b[...].T, preferred_element_type=jnp.float32) for a, b in ((k, q), (v, do)))
            weights = self._weights(scores, slot, scratch)
            ds = self._pass_ds(item, step, weights, dp, slot, warpgroup, scratch)
            products = [(0, ds, q), (1, weights.astype(self.dtype), do)]
            dk, dv = tiles.accumulated((*dk, *dv), products, self.interpret)
        else:
            none = filled((ROWS, ROWS), 0, WGMMA)
            *_, dk, dv = pl.run_state(chain)(tuple(plgpu.ACC.init(x) for x in (none, none, *dk, *dv)))
        plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return (dk,), (dv,)

    # --- the helper: dq -----------------------------------------------------------------------------------------------

    def _add_dq(self, item, refs, scratch):
        for owner in self._owners_of(item):
            plgpu.barrier_wait(scratch["own_arrived"].at[owner])

        def body(tile, _):
            dq = self._dq(item, tile, 0, scratch)

            @pl.when(lax.rem(tile, self.group) == 0)
            def _():
                # The previous turn ends only now, so that its additions had a product's time to arrive.
                pl.when(tile > 0)(lambda: self._end_turn(item, tile - 1, refs))
                self._wait_for_turn(item, tile, refs)

            @pl.when(~self._is_last(item))
            def _():
                smem = scratch["sum_smem"].at[lax.rem(tile, self.group)]
                smem[...] = dq
                plgpu.commit_smem()
                self._add_to_sums(item, tile, 0, smem, refs)

            @pl.when(self._is_last(item))
            def _():
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                sums = self._sums(item, tile, 0, refs)
                others = sums[...] if self.interpret else plgpu.load(sums, layout=WGMMA, optimized=False)
                self._round_dq(0, dq + others, scratch)
                self._store_dq(item, tile, refs, scratch)

        lax.fori_loop(0, self.query_tiles, body, None)
        self._end_turn(item, self.query_tiles - 1, refs)
