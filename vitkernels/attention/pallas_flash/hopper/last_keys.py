"""The last few keys of a head, which the helper of the short backward kernel of `pallas_flash` on Hopper processes.

197 keys are three tiles of 64, one per compute warpgroup, and 5 more. As rows of products, these would take as long as
64 keys. Here they are columns, 8 or 16, of S = q kᵀ and dP = dO vᵀ, a tile of queries at a time. Their gradients are
computed transposed: dkᵀ = qᵀ dS and dvᵀ = dOᵀ P.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.tiles import BY_ROW, ROWS, WGMMA, along_rows, at, filled, transposed

MOST = 16  # keys


@dataclass(frozen=True)
class LastKeys:
    """The keys behind those of the compute warpgroups; they lie at the start of a tile of their own.

    scratch: that of the kernel, with what the method `scratch` returns. zero: see HopperKernel.opaque.
    """

    count: int
    tile: int  # its number among the tiles of keys
    head_dim: int
    dtype: str
    log2_scale: float
    interpret: bool

    @property
    def columns(self) -> int:
        return tiles.padded_columns(self.count)

    @property
    def first_row(self) -> int:
        return self.tile * ROWS

    def scratch(self) -> dict:
        """Return the scratch for the last values, for weights and dS, transposed, and for dv and dk."""
        dtype = jnp.dtype(self.dtype)
        return {
            "last_v_smem": tiles.tile(self.columns, self.head_dim, dtype, 1),
            "last_weights_smem": tiles.tile(self.columns, ROWS, dtype, 1),
            "last_ds_smem": tiles.tile(ROWS, ROWS, dtype, 1),
            "last_gradients_smem": tiles.tile(self.columns, self.head_dim, dtype, 2),
        }

    def clear(self, scratch: dict) -> None:
        """Fill dS with zeros, because the product for dq contracts over 64 keys."""
        (ds,) = at(scratch["last_ds_smem"], 0)
        ds[...] = filled((ROWS, ROWS), 0, WGMMA, ds.dtype)

    def zeros(self) -> tuple[jax.Array, jax.Array]:
        """Return accumulators for dvᵀ and dkᵀ, whose rows are those of the head dim, padded to 64."""
        return (filled((ROWS, self.columns), 0, WGMMA),) * 2

    def put_weights(self, tile, scratch, zero):
        """Put the weights and dS of a tile of queries into shared memory."""
        q, do = (at(scratch[f"{name}_smem"], tile) for name in ("q", "do"))
        k = tiles.first_rows(at(scratch["k_smem"], zero + self.tile), self.columns)
        v = at(scratch["last_v_smem"], zero)
        lse, delta = (plgpu.load(scratch[f"{name}_smem"].at[tile], layout=BY_ROW) for name in ("lse", "delta"))
        scores, dp = tiles.products((None, q, k), (None, do, v), interpret=self.interpret)
        exponents = scores * self.log2_scale - along_rows(lse, scores.shape)
        # Scores past the last key are 0, maybe far above the log-sum-exp: exp2 would overflow, and inf times 0 is NaN.
        weights = jnp.exp2(jnp.minimum(exponents, 0.0)).astype(self.dtype)
        ds = (weights.astype(jnp.float32) * (dp - along_rows(delta, dp.shape))).astype(self.dtype)
        self._put((weights, ds), self._weights_and_ds(scratch, zero))

    def products(self, tile, scratch: dict, zero) -> list:
        """Return the factors of what the last keys add to dq of a tile, and of what the tile adds to dvᵀ and dkᵀ."""
        (q,), (do,) = (at(scratch[f"{name}_smem"], tile) for name in ("q", "do"))
        (k,), (all_ds,) = at(scratch["k_smem"], zero + self.tile), at(scratch["last_ds_smem"], zero)
        weights, ds = self._weights_and_ds(scratch, zero)
        return [
            (0, transposed(all_ds), k),
            (1, transposed(do), transposed(weights)),
            (2, transposed(q), transposed(ds)),
        ]

    def put_gradients(self, sums: tuple, scale: float, scratch: dict, zero) -> None:
        """Put dv and dk into shared memory, as rows."""
        dv, dk = sums
        rows = (at(scratch["last_gradients_smem"], zero + i)[0] for i in (0, 1))
        self._put((dv.astype(self.dtype), (dk * scale).astype(self.dtype)), rows)

    def _weights_and_ds(self, scratch: dict, zero) -> tuple:
        parts = tuple(at(scratch[f"last_{name}_smem"], zero)[0] for name in ("weights", "ds"))
        return tiles.first_rows(parts, self.columns)

    def _put(self, values: tuple, parts) -> None:
        for x, part in zip(values, parts, strict=True):
            transposed(part)[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
