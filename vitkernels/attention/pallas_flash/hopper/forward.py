"""The forward kernel of `pallas_flash` on Hopper: TMA, wgmma, online softmax.

Own rows are queries, 64 for each computing warpgroup; tiles of keys and of values stream by.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles as parts
from vitkernels.attention.pallas_flash.hopper.ring import OwnRows, Ring, Stream
from vitkernels.attention.pallas_flash.hopper.tiles import BY_ROW, LOG2E, ROWS, along_rows, at, filled

LOWEST = -1e30  # below every score, and finite, so that a tile without any key for some query does no harm


class Forward(Ring):
    """The kernel; call it with JAX arrays, or hand it to vitkernels.bridge.mosaic_gpu.Kernel."""

    def __call__(self, q_BNHD, k_BMHD, v_BMHD):
        """out (B, N, H, D) and log-sum-exp in log2 units (B, H, padded N)."""
        scratch = {
            "q_smem": self.own_tiles(),
            "k_smem": self.ring(),
            "v_smem": self.ring(),
            "q_arrived": self.own_arrived(self.copies),
            "q_consumed": self.own_consumed(),
            "k_arrived": self.arrived(self.copies),
            "v_arrived": self.arrived(self.copies),
            "k_consumed": self.consumed(),
            "v_consumed": self.consumed(),
        }
        kernel = self.kernel(self._body, self.queries, (self.rows(self.queries, self.heads), self.vector()), scratch)
        return kernel(q_BNHD, k_BMHD, v_BMHD)

    @property
    def steps(self) -> int:
        return pl.cdiv(self.keys, self.schedule.tile)

    def _body(self, q_ref, k_ref, v_ref, out_ref, lse_ref, **scratch):
        def load_queries(piece, warpgroup):
            owner, first = self.owner(piece.number, warpgroup), self.first_row(piece, warpgroup)
            q_smem, arrived = scratch["q_smem"], scratch["q_arrived"].at[owner]
            parts.load_rows(q_ref, piece.batch, first, self.heads_of(piece)[0], q_smem, owner, arrived, self.interpret)

        def stream(ref, which, name):
            smem, arrived, consumed = (scratch[f"{name}_{kind}"] for kind in ("smem", "arrived", "consumed"))

            def load(piece, step, slot):
                head, first = self.heads_of(piece)[which], step * self.schedule.tile
                parts.load_rows(ref, piece.batch, first, head, smem, slot, arrived.at[slot], self.interpret)

            return Stream(load, arrived, consumed)

        self.divide_roles(
            self.queries,
            self._steps_of,
            OwnRows(load_queries, (scratch["q_arrived"],), scratch["q_consumed"]),
            [stream(k_ref, 1, "k"), stream(v_ref, 2, "v")],
            lambda *where: self._attend(*where, out_ref, lse_ref, scratch),
        )

    def _steps_of(self, piece):
        """Tiles of keys that this piece goes through: those that its queries see."""
        if not self.is_causal:
            return self.steps
        queries = ROWS * self.schedule.warpgroups
        seen = (piece.tile + 1) * queries
        return lax.min(lax.div(seen + self.schedule.tile - 1, self.schedule.tile), self.steps)

    def _attend(self, piece, warpgroup, meanwhile, out_ref, lse_ref, scratch):
        owner, first = self.owner(piece.number, warpgroup), self.first_row(piece, warpgroup)
        q_smem = at(scratch["q_smem"], owner)
        plgpu.barrier_wait(scratch["q_arrived"].at[owner])
        out, lse = self.finish(*self._over_keys(piece, q_smem, first, meanwhile, scratch))
        for part, x in zip(q_smem, out, strict=True):
            part[...] = x.astype(part.dtype)
        lse_ref.at[piece.batch, piece.head, pl.ds(first, ROWS)][...] = lse
        plgpu.commit_smem()
        parts.store_rows(scratch["q_smem"], owner, out_ref, piece.batch, first, piece.head, self.interpret)

    def _over_keys(self, piece, q_smem, first_query, meanwhile, scratch):
        def step_of(step, carry, keys):
            return self._step(piece, q_smem, first_query, step, keys, carry, scratch)

        steps = self._steps_of(piece) if self.is_causal else None
        return self.over_tiles(self.keys, step_of, self.start(), meanwhile, steps)

    def _step(self, piece, q_smem, first_query, step, keys, carry, scratch):
        """The first `keys` keys of a tile into the running output, maximum and sum."""
        s, slot = self.schedule, self.slot(piece, step)
        # 72 columns of 128 took longer than all of them (577 tokens, 0.300 ms instead of 0.296).
        columns = parts.narrow(keys) if 2 * keys <= s.tile else s.tile
        plgpu.barrier_wait(scratch["k_arrived"].at[slot])

        def scores_of(acc_ref):
            for q, k in zip(q_smem, parts.first_rows(at(scratch["k_smem"], slot), columns), strict=True):
                plgpu.wgmma(acc_ref, q, parts.transposed(k))
            return acc_ref[...]

        scores = pl.run_scoped(scores_of, plgpu.ACC((ROWS, columns), jnp.float32))
        plgpu.barrier_arrive(scratch["k_consumed"].at[slot])
        weights, out, highest, total = self.weighed(scores, first_query, step * s.tile, keys, carry)
        plgpu.barrier_wait(scratch["v_arrived"].at[slot])
        v_smem = parts.first_rows(at(scratch["v_smem"], slot), weights.shape[1])
        out = parts.accumulated(out, [(i, weights, v) for i, v in enumerate(v_smem)], self.interpret)
        plgpu.barrier_arrive(scratch["v_consumed"].at[slot])
        return out, highest, total

    # --- online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867), a carry of output, maximum and sum -----------

    def start(self) -> tuple:
        return self.zeros(), filled((ROWS,), LOWEST, BY_ROW), filled((ROWS,), 0, BY_ROW)

    def weighed(self, scores, first_query, first_key, keys, carry) -> tuple:
        """The weights of `keys` keys from first_key on, rounded, and the carry as they are relative to it."""
        out, highest, total = carry
        scale = self.scale * LOG2E
        if scale <= 0:
            scores, scale = scores * scale, 1.0
        if self.is_causal or keys < scores.shape[1]:
            scores = self._masked(scores, first_query, first_key)
        new_highest = jnp.maximum(highest, scores.max(axis=1) * scale)
        shrink = jnp.exp2(highest - new_highest)
        weights = jnp.exp2(scores * scale - along_rows(new_highest, scores.shape))
        out = tuple(x * along_rows(shrink, x.shape) for x in out)
        total = total * shrink + weights.sum(axis=1)
        return parts.widened(weights.astype(self.dtype)), out, new_highest, total

    def finish(self, out, highest, total) -> tuple:
        """The output, and the log-sum-exp in log2 units."""
        inverse = 1 / total
        return tuple(x * along_rows(inverse, x.shape) for x in out), highest + jnp.log(total) * LOG2E

    def _masked(self, scores, first_query, first_key):
        key = parts.position(scores.shape, 1) + first_key
        keep = key < self.keys
        if self.is_causal:
            keep = keep & (key <= parts.position(scores.shape, 0) + first_query)
        return jnp.where(keep, scores, -jnp.inf)
