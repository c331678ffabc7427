"""Matrix products for NVIDIA Hopper with GELU or its gradient in an overlapped epilogue; in Pallas (Mosaic GPU).

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.ops.linear.pallas_hopper_kernel import (
    CONSUMERS,
    PART,
    ROWS,
    WGMMA,
    HopperProduct,
    LinearProduct,
    tiles_m,
)


@dataclass(frozen=True)
class LinearGelu(LinearProduct):
    """Two outputs: what the backward pass needs, and gelu(x weightᵀ + bias), computed from the unrounded product.

    keep: the first output is GELU's slope, because the caller keeps the activation; else it is the pre-activation.
    """

    tanh: bool
    keep: bool

    outputs = 2

    @property
    def stages(self) -> int:
        return 4 if self.columns == 192 else 5

    def epilogue(self, product) -> tuple:
        act, slope = gelu_and_slope(product, self.tanh, self.interpret)
        return slope if self.keep else product, act


@dataclass(frozen=True)
class GeluLinearBackward(HopperProduct):
    """(dy weight) gelu'(pre), where `saved` is pre, or gelu'(pre) if keep."""

    tanh: bool
    keep: bool

    right_is_NK = False
    columns = 128
    stages = 4

    def inputs(self) -> tuple:
        return self.array(self.M, self.K), self.array(self.K, self.N), self.array(self.M, self.N)

    def __call__(self, dy_MK, weight_KN, saved_MN):
        """Return dpre (M, N), and its float32 sums over each tile's rows, (tiles_m(M), N)."""
        out_type = self.array(self.M, self.N), self.array(tiles_m(self.M), self.N, dtype="float32")
        parts = self.columns // PART
        scratch = {
            "saved_smem": self.shared(CONSUMERS, parts, ROWS, PART),
            "ones_smem": self.shared(CONSUMERS, PART, PART),
            "sums_smem": plgpu.SMEM((CONSUMERS, self.columns), jnp.float32),
            "saved_arrived": plgpu.Barrier(num_arrivals=parts, num_barriers=CONSUMERS),
        }
        return self.kernel(self._body, out_type, scratch)(dy_MK, weight_KN, saved_MN)

    def _body(
        self, dy_ref, weight_ref, saved_ref, dpre_ref, sums_ref, saved_smem, ones_smem, sums_smem, saved_arrived, **ring
    ):
        parts = self.columns // PART

        def prepare(group):
            ones_smem[group] = plgpu.layout_cast(jnp.ones((PART, PART), self.dtype), WGMMA)

        def compute(group, i):
            row, column = self.tile(i)
            places = [(pl.ds(row, ROWS), pl.ds(column + part * PART, PART)) for part in range(parts)]
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's dpre, in the memory that `saved` reuses
            for part, place in enumerate(places):
                plgpu.copy_gmem_to_smem(saved_ref.at[place], saved_smem.at[group, part], saved_arrived.at[group])

            def finish(acc_ref, *sum_refs):
                acc = self.multiply(acc_ref, group, i, ring)
                plgpu.barrier_wait(saved_arrived.at[group])
                for part, sum_ref in enumerate(sum_refs):
                    pieces = [saved_smem.at[group, part, pl.ds(r, PART)] for r in range(0, ROWS, PART)]
                    for r, piece in enumerate(pieces):
                        saved = plgpu.load(piece, layout=WGMMA).astype(jnp.float32)
                        slope = saved if self.keep else gelu_and_slope(saved, self.tanh, self.interpret)[1]
                        dact = acc[r * PART : (r + 1) * PART, part * PART : (part + 1) * PART]
                        piece[...] = (dact * slope).astype(self.dtype)
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(saved_smem.at[group, part], dpre_ref.at[places[part]])
                    # Column sums as dpreᵀ times eight columns of ones: faster than shuffles across warps.
                    for piece in pieces:
                        ones = ones_smem.at[group, pl.ds(0, 8)].transpose((1, 0))
                        plgpu.wgmma(sum_ref, piece.transpose((1, 0)), ones)
                for part, sum_ref in enumerate(sum_refs):
                    sums_smem[group, part * PART : (part + 1) * PART] = sum_ref[...].max(axis=1)
                plgpu.commit_smem()
                plgpu.copy_smem_to_gmem(
                    sums_smem.at[group], sums_ref.at[lax.div(row, jnp.int32(ROWS)), pl.ds(column, self.columns)]
                )

            sum_refs = [plgpu.ACC((PART, 8), jnp.float32)] * parts
            pl.run_scoped(finish, plgpu.ACC((ROWS, self.columns), jnp.float32), *sum_refs)

        self.run_warpgroups(dy_ref, weight_ref, ring, compute, prepare)


# --- GELU -------------------------------------------------------------------------------------------------------------


def gelu_and_slope(x, tanh: bool, interpret: bool):
    """Return gelu(x) and gelu'(x); the compiler drops an unused one.

    gelu(x) = max(x, 0) - |x| Φ(-|x|) takes fewer instructions than x Φ(x).
    """
    if tanh:
        cdf = _logistic(x, interpret)
        return x * cdf, cdf + x * cdf * (1.0 - cdf) * (1.5957691216057308 + 0.2140644488 * x * x)
    bell, tail = _tail(x, interpret)
    tail = tail * bell
    cdf = jnp.where(x < 0, tail, 1.0 - tail)
    return jnp.maximum(x, 0.0) - jnp.abs(x) * tail, cdf + x * bell * (1 / math.sqrt(2 * math.pi))


def _logistic(x, interpret: bool):
    """Return (1 + tanh u) / 2 = 1 / (1 + exp(-2u)) with u = sqrt(2/π) (x + 0.044715 x³)."""
    return _reciprocal(1.0 + jnp.exp2(x * (-2.302208198144325 - 0.1029432396 * x * x)), interpret)


def _tail(x, interpret: bool):
    """Return exp(-x²/2) and Φ(-|x|) / exp(-x²/2), by Abramowitz and Stegun 7.1.26 (error 0.75e-7)."""
    bell = jnp.exp2(-0.5 / math.log(2) * x * x)
    t = _reciprocal(1.0 + 0.23164190 * jnp.abs(x), interpret)  # 0.3275911 / sqrt(2)
    tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
    return bell, tail * t


def _reciprocal(x, interpret: bool):
    """Return 1 / x by one instruction that JAX does not expose; a division takes nine."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA))
    def reciprocal(_, x):
        return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

    return reciprocal(x)
