"""The backward kernels of `pallas_flash` on Hopper: dq (and rowsum(dO O) on the way), then dk and dv.

Both recompute the weights from the forward pass's log-sum-exp (FlashAttention-2, Dao 2023, arXiv 2307.08691). Tiles
beyond the last token come in as zeros, and what they give is never stored.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention import pallas_flash_hopper_parts as parts
from vitkernels.attention.pallas_flash_hopper_parts import (
    BY_COLUMN,
    BY_ROW,
    LOG2E,
    ROWS,
    along_columns,
    along_rows,
    at,
    row_sums,
    slot_of,
)


class Backward(parts.Problem):
    """The two kernels, `dq` first; each with a schedule of its own."""

    # --- dq -----------------------------------------------------------------------------------------------------------

    def dq(self, q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN):
        """dq in an array like q's, and delta = rowsum(dO O), (B, H, padded N) like lse."""
        scratch = {
            "q_smem": self.own_tiles(),
            "do_smem": self.own_tiles(),
            "out_smem": self.own_tiles(),
            "lse_smem": plgpu.SMEM((self.schedule.warpgroups, ROWS), jnp.float32),
            "k_smem": self.ring(),
            "v_smem": self.ring(),
            "q_arrived": plgpu.Barrier(num_arrivals=self.copies, num_barriers=self.schedule.warpgroups),
            "do_arrived": plgpu.Barrier(num_arrivals=2 * self.copies + 1, num_barriers=self.schedule.warpgroups),
            "arrived": self.arrived(2 * self.copies),
            "consumed": self.consumed(),
        }
        kernel = self.kernel(
            self._dq_body, self.queries, (self.rows(self.queries, self.all_heads), self.vector()), scratch
        )
        return kernel(q_BNHD, k_BMHD, v_BMHD, out_BNHD, do_BNHD, lse_BHN)

    def _dq_body(self, q_ref, k_ref, v_ref, out_ref, do_ref, lse_ref, dq_ref, delta_ref, **scratch):
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        q_head, k_head, v_head = self.heads_here()
        steps = pl.cdiv(self.keys, self.schedule.tile)

        def load(step, slot):
            arrived = scratch["arrived"].at[slot]
            for ref, at_head, name in ((k_ref, k_head, "k_smem"), (v_ref, v_head, "v_smem")):
                parts.load_rows(
                    ref, batch, step * self.schedule.tile, at_head, scratch[name], slot, arrived, self.interpret
                )

        def compute(warpgroup):
            first = self.first_row()
            q_arrived, do_arrived = (scratch[name].at[warpgroup] for name in ("q_arrived", "do_arrived"))
            lse_smem = scratch["lse_smem"].at[warpgroup]

            def load_own(ref, at_head, name, arrived):
                parts.load_rows(ref, batch, first, at_head, scratch[name], warpgroup, arrived, self.interpret)

            load_own(do_ref, head, "do_smem", do_arrived)
            load_own(out_ref, head, "out_smem", do_arrived)
            plgpu.copy_gmem_to_smem(lse_ref.at[batch, head, pl.ds(first, ROWS)], lse_smem, do_arrived)
            load_own(q_ref, q_head, "q_smem", q_arrived)
            plgpu.barrier_wait(do_arrived)
            q, do, out = (at(scratch[name], warpgroup) for name in ("q_smem", "do_smem", "out_smem"))
            lse = plgpu.load(lse_smem, layout=BY_ROW)
            delta = sum(row_sums(x, y) for x, y in zip(do, out, strict=True))
            plgpu.barrier_wait(q_arrived)

            def step_of(step, dq, keys):
                return self._add_to_dq(step, keys, dq, first, q, do, lse, delta, scratch)

            dq = self._over_tiles(self.keys, step_of, self.zeros())
            for part, x in zip(q, dq, strict=True):
                part[...] = (x * self.scale).astype(part.dtype)
            lse_smem[...] = delta
            plgpu.commit_smem()
            parts.store_rows(scratch["q_smem"], warpgroup, dq_ref, batch, first, q_head, self.interpret)
            plgpu.copy_smem_to_gmem(lse_smem, delta_ref.at[batch, head, pl.ds(first, ROWS)])
            plgpu.wait_smem_to_gmem(0)

        parts.divide_roles(self.schedule, steps, [(load, scratch["consumed"])], compute)

    def _over_tiles(self, tokens: int, step_of, carry):
        """step_of(step, carry, tokens) for each tile; the last one's tokens are only those that there are."""
        whole, last = divmod(tokens, self.schedule.tile)
        carry = lax.fori_loop(0, whole, lambda step, carry: step_of(step, carry, self.schedule.tile), carry)
        return step_of(jnp.int32(whole), carry, last) if last else carry

    def _add_to_dq(self, step, keys, dq, first_query, q, do, lse, delta, scratch):
        slot, columns = slot_of(step, self.schedule), parts.narrow(keys)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        k, v = at(scratch["k_smem"], slot), at(scratch["v_smem"], slot)
        scores, dp = parts.products((q, parts.first_rows(k, columns)), (do, parts.first_rows(v, columns)))
        weights = jnp.exp2(scores * (self.scale * LOG2E) - along_rows(lse, scores.shape))
        if self.is_causal or keys < columns:
            key = parts.position(scores.shape, 1) + step * self.schedule.tile
            keep = key < self.keys
            if self.is_causal:
                keep = keep & (key <= parts.position(scores.shape, 0) + first_query)
            weights = jnp.where(keep, weights, 0.0)
        ds = parts.widened((weights * (dp - along_rows(delta, dp.shape))).astype(self.dtype))
        k = parts.first_rows(k, ds.shape[1])
        dq = parts.accumulated(dq, [(i, ds, part) for i, part in enumerate(k)], self.interpret)
        if self.schedule.loader:
            plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return dq

    # --- dk, dv -------------------------------------------------------------------------------------------------------

    def dkdv(self, q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN):
        """dk and dv in arrays like k's and v's."""
        vectors = plgpu.SMEM((self.schedule.stages, self.schedule.tile), jnp.float32)
        scratch = {
            "k_smem": self.own_tiles(),
            "v_smem": self.own_tiles(),
            "q_smem": self.ring(),
            "do_smem": self.ring(),
            "lse_smem": vectors,
            "delta_smem": vectors,
            "own_arrived": plgpu.Barrier(num_arrivals=2 * self.copies, num_barriers=self.schedule.warpgroups),
            "arrived": self.arrived(2 * self.copies + 2),
            "consumed": self.consumed(),
        }
        keys = self.rows(self.keys, self.all_heads)
        kernel = self.kernel(self._dkdv_body, self.keys, (keys, keys), scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD, do_BNHD, lse_BHN, delta_BHN)

    def _dkdv_body(self, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, dk_ref, dv_ref, **scratch):
        batch, head = lax.axis_index("batch"), lax.axis_index("head")
        q_head, k_head, v_head = self.heads_here()
        steps = pl.cdiv(self.queries, self.schedule.tile)

        def load(step, slot):
            arrived, first = scratch["arrived"].at[slot], step * self.schedule.tile
            for ref, at_head, name in ((q_ref, q_head, "q_smem"), (do_ref, head, "do_smem")):
                parts.load_rows(ref, batch, first, at_head, scratch[name], slot, arrived, self.interpret)
            for ref, name in ((lse_ref, "lse_smem"), (delta_ref, "delta_smem")):
                plgpu.copy_gmem_to_smem(
                    ref.at[batch, head, pl.ds(first, self.schedule.tile)], scratch[name].at[slot], arrived
                )

        def compute(warpgroup):
            first = self.first_row()
            arrived = scratch["own_arrived"].at[warpgroup]
            for ref, at_head, name in ((k_ref, k_head, "k_smem"), (v_ref, v_head, "v_smem")):
                parts.load_rows(ref, batch, first, at_head, scratch[name], warpgroup, arrived, self.interpret)
            plgpu.barrier_wait(arrived)
            k, v = at(scratch["k_smem"], warpgroup), at(scratch["v_smem"], warpgroup)

            def step_of(step, carry, queries):
                return self._add_to_dkdv(step, queries, carry, first, k, v, scratch)

            dk, dv = self._over_tiles(self.queries, step_of, (self.zeros(), self.zeros()))
            for part, x in zip(k, dk, strict=True):
                part[...] = (x * self.scale).astype(part.dtype)
            for part, x in zip(v, dv, strict=True):
                part[...] = x.astype(part.dtype)
            plgpu.commit_smem()
            parts.store_rows(scratch["k_smem"], warpgroup, dk_ref, batch, first, k_head, self.interpret)
            parts.store_rows(scratch["v_smem"], warpgroup, dv_ref, batch, first, v_head, self.interpret)
            plgpu.wait_smem_to_gmem(0)

        parts.divide_roles(self.schedule, steps, [(load, scratch["consumed"])], compute)

    def _add_to_dkdv(self, step, queries, carry, first_key, k, v, scratch):
        slot, columns = slot_of(step, self.schedule), parts.narrow(queries)
        plgpu.barrier_wait(scratch["arrived"].at[slot])
        q, do = at(scratch["q_smem"], slot), at(scratch["do_smem"], slot)
        # Transposed: keys by queries.
        scores, dp = parts.products((k, parts.first_rows(q, columns)), (v, parts.first_rows(do, columns)))
        lse, delta = (
            plgpu.load(scratch[name].at[slot, pl.ds(0, columns)], layout=BY_COLUMN)
            for name in ("lse_smem", "delta_smem")
        )
        weights = jnp.exp2(scores * (self.scale * LOG2E) - along_columns(lse, scores.shape))
        if self.is_causal:
            query = parts.position(scores.shape, 1) + step * self.schedule.tile
            weights = jnp.where(parts.position(scores.shape, 0) + first_key <= query, weights, 0.0)
        ds = parts.widened((weights * (dp - along_columns(delta, dp.shape))).astype(self.dtype))
        weights = parts.widened(weights.astype(self.dtype))
        q, do = parts.first_rows(q, ds.shape[1]), parts.first_rows(do, ds.shape[1])
        dk, dv = carry
        products = [(i, ds, part) for i, part in enumerate(q)]
        products += [(len(dk) + i, weights, part) for i, part in enumerate(do)]
        sums = parts.accumulated((*dk, *dv), products, self.interpret)
        if self.schedule.loader:
            plgpu.barrier_arrive(scratch["consumed"].at[slot])
        return sums[: len(dk)], sums[len(dk) :]
