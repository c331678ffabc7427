"""Matrix products for NVIDIA Hopper with GELU, or its gradient, behind the tensor cores' work; in Pallas (Mosaic GPU).

A thread block stays on each multiprocessor and goes through tiles of the result. Two of its warpgroups each have a tile
of their own: while one is in its epilogue, the tensor cores multiply for the other (the ping-pong schedule of CUTLASS,
media/docs/cpp/efficient_gemm.md there). A third warpgroup keeps a ring of pieces of both factors filled, in the order
in which the two need them: that is what makes them take turns. Pairs of blocks, one below the other, share the right
factor's pieces: each fetches half of them for both.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 128  # of a tile
STEP = 64  # of K: a piece is as wide as the widest swizzle
PART = 64  # rows and columns of a result that an epilogue has in hand at a time
GROUPS = 2  # of warps that multiply
REGISTERS = 232, 40  # per thread of the multiplying groups and of the loader; 512 for the three together

WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = WGMMA.reduce(0)
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")


def tiles_m(M: int) -> int:
    """Rows of tiles, two for each pair of blocks; the last may lie beyond M."""
    return 2 * pl.cdiv(M, 2 * ROWS)


@dataclass(frozen=True)
class Product:
    """One product as its kernel is compiled for it: M a multiple of 8, N of 128, K of 64; dtype of 16 bits.

    keep: gelu's slope is saved between forward and backward pass, for gelu's result is kept; else what it was given.
    pairs: of thread blocks; one for every two multiprocessors.
    """

    M: int
    N: int
    K: int
    dtype: str
    tanh: bool
    keep: bool
    pairs: int
    interpret: bool = False

    right_is_NK = True  # or (K, N)

    @property
    def columns(self) -> int:
        """Of a tile."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Pieces in the ring; what shared memory has room for."""
        raise NotImplementedError

    @property
    def steps(self) -> int:
        return self.K // STEP

    @property
    def tiles_n(self) -> int:
        return self.N // self.columns

    def array(self, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))

    def shared(self, *shape: int) -> plgpu.SMEM:
        transforms = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
        return plgpu.SMEM(shape, jnp.dtype(self.dtype), transforms=transforms)

    def kernel(self, body, out_type: tuple, scratch: dict):
        right = (self.columns, STEP) if self.right_is_NK else (STEP, self.columns)
        ring = {
            "left_smem": self.shared(self.stages, ROWS, STEP),
            "right_smem": self.shared(self.stages, *right),
            # One set for each group, because whoever waits for a barrier must wait for each of its turns.
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=GROUPS * self.stages),
            "emptied": plgpu.ClusterBarrier(collective_axes=("half",), num_barriers=self.stages),
        }
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=ring | scratch,
            grid=(self.pairs,),
            grid_names=("pair",),
            cluster=(2,),
            cluster_names=("half",),
            num_threads=GROUPS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Needless here: what a warp reads of shared memory, the copy engine or the same warp has written.
                unsafe_no_auto_barriers=True,
            ),
            interpret=INTERPRETED if self.interpret else None,
        )

    def tiles_here(self):
        """How many tiles each of this pair's blocks goes through."""
        tiles = tiles_m(self.M) // 2 * self.tiles_n
        return lax.div(tiles - lax.axis_index("pair") + self.pairs - 1, jnp.int32(self.pairs))

    def tile(self, i):
        """First row and column of this block's i-th tile; all pairs together go along the rows of tiles, so that the
        left factor comes from memory once."""
        tile = lax.axis_index("pair") + i * self.pairs
        row = 2 * lax.div(tile, jnp.int32(self.tiles_n)) + lax.axis_index("half")
        return row * ROWS, lax.rem(tile, jnp.int32(self.tiles_n)) * self.columns

    def divide_roles(self, left_ref, right_ref, ring: dict, compute, prepare=lambda group: None) -> None:
        """prepare(group), then compute(group, i) for each of its tiles, while their factors arrive."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < GROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS[0], action="increase")
            prepare(warpgroup)

            @pl.loop(0, lax.div(self.tiles_here() - warpgroup + GROUPS - 1, jnp.int32(GROUPS)))
            def _(turn):
                compute(warpgroup, GROUPS * turn + warpgroup)

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == GROUPS)
        def _():
            plgpu.set_max_registers(REGISTERS[1], action="decrease")
            self._load(left_ref, right_ref, ring)

    def _load(self, left_ref, right_ref, ring: dict) -> None:
        @pl.loop(0, self.tiles_here())
        def _(i):
            row, column = self.tile(i)
            rows, columns = pl.ds(row, ROWS), pl.ds(column, self.columns)

            @pl.loop(0, self.steps)
            def _(k):
                step = i * self.steps + k
                slot = self._slot(step)
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(ring["emptied"].at[slot]))
                filled = ring["filled"].at[lax.rem(i, GROUPS) * self.stages + slot]
                inner = pl.ds(k * STEP, STEP)
                right = right_ref.at[(columns, inner) if self.right_is_NK else (inner, columns)]
                plgpu.copy_gmem_to_smem(left_ref.at[rows, inner], ring["left_smem"].at[slot], filled)
                plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[slot], filled, collective_axes=("half",))

        # No block may end while the other can still report to it.
        steps = self.tiles_here() * self.steps
        pl.loop(lax.max(steps - self.stages, 0), steps)(
            lambda step: plgpu.barrier_wait(ring["emptied"].at[self._slot(step)])
        )

    def _slot(self, step):
        return lax.rem(step, self.stages)

    def multiply(self, acc_ref, group, i, ring: dict):
        """The group's i-th tile, in float32. A piece is given back once the next one's product has been begun."""

        def step_of(k):
            slot = self._slot(i * self.steps + k)
            plgpu.barrier_wait(ring["filled"].at[group * self.stages + slot])
            right = ring["right_smem"].at[slot]
            plgpu.wgmma(acc_ref, ring["left_smem"].at[slot], right.transpose((1, 0)) if self.right_is_NK else right)

        def give_back(k):
            plgpu.barrier_arrive(ring["emptied"].at[self._slot(i * self.steps + k)])

        step_of(0)

        @pl.loop(1, self.steps)
        def _(k):
            step_of(k)
            plgpu.wgmma_wait(1)
            give_back(k - 1)

        plgpu.wgmma_wait(0)
        give_back(self.steps - 1)
        return acc_ref[...]


class Forward(Product):
    """gelu(x weightᵀ + bias)."""

    @property
    def columns(self) -> int:
        return 192 if self.N % 192 == 0 else 128  # the fewer tiles, the less both factors are read

    @property
    def stages(self) -> int:
        return 4 if self.columns == 192 else 5

    def inputs(self) -> tuple:
        return self.array(self.M, self.K), self.array(self.N, self.K), self.array(self.N, dtype="float32")

    def __call__(self, x_MK, weight_NK, bias_N):
        """What is saved for the backward pass, and what GELU gives: two arrays (M, N). The bias is float32.

        GELU is calculated from the product before it is rounded.
        """
        result = self.array(self.M, self.N)
        scratch = {name: self.shared(GROUPS, 2, PART, PART) for name in ("saved_smem", "act_smem")}
        return self.kernel(self._body, (result, result), scratch)(x_MK, weight_NK, bias_N)

    def _body(self, x_ref, weight_ref, bias_ref, saved_ref, act_ref, saved_smem, act_smem, **ring):
        def compute(group, i):
            row, column = self.tile(i)
            acc = pl.run_scoped(
                lambda acc_ref: self.multiply(acc_ref, group, i, ring), plgpu.ACC((ROWS, self.columns), jnp.float32)
            )
            parts = [(r, c) for c in range(0, self.columns, PART) for r in range(0, ROWS, PART)]
            for count, (r, c) in enumerate(parts):
                bias = plgpu.load(bias_ref.at[pl.ds(column + c, PART)], layout=BY_COLUMN, optimized=False)
                pre = acc[r : r + PART, c : c + PART] + lax.broadcast_in_dim(bias, (PART, PART), [1])
                act, slope = gelu_and_slope(pre, self.tanh, self.interpret)
                slot = count % 2
                plgpu.wait_smem_to_gmem(2, wait_read_only=True)  # all but the last part's two copies
                saved_smem[group, slot] = (slope if self.keep else pre).astype(self.dtype)
                act_smem[group, slot] = act.astype(self.dtype)
                plgpu.commit_smem()
                here = pl.ds(row + r, PART), pl.ds(column + c, PART)
                plgpu.copy_smem_to_gmem(saved_smem.at[group, slot], saved_ref.at[here])
                plgpu.copy_smem_to_gmem(act_smem.at[group, slot], act_ref.at[here])

        self.divide_roles(x_ref, weight_ref, ring, compute)


class Backward(Product):
    """(dy weight) gelu'(pre), where `saved` is pre or, with `keep`, gelu'(pre)."""

    right_is_NK = False
    columns = 128
    stages = 4

    def inputs(self) -> tuple:
        return self.array(self.M, self.K), self.array(self.K, self.N), self.array(self.M, self.N)

    def __call__(self, dy_MK, weight_KN, saved_MN):
        """dpre (M, N), and its sums over each tile's rows, (tiles_m(M), N) in float32."""
        out_type = self.array(self.M, self.N), self.array(tiles_m(self.M), self.N, dtype="float32")
        parts = self.columns // PART
        scratch = {
            "saved_smem": self.shared(GROUPS, parts, ROWS, PART),
            "ones_smem": self.shared(GROUPS, PART, PART),
            "sums_smem": plgpu.SMEM((GROUPS, self.columns), jnp.float32),
            "saved_arrived": plgpu.Barrier(num_arrivals=parts, num_barriers=GROUPS),
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
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # dpre of the tile before, which lies where `saved` will
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
                    # dpreᵀ times a column of ones, eight times over: across warps, shuffles take longer.
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

        self.divide_roles(dy_ref, weight_ref, ring, compute, prepare)


# --- GELU -------------------------------------------------------------------------------------------------------------


def gelu_and_slope(x, tanh: bool, interpret: bool):
    """gelu(x) and gelu'(x); the compiler drops what is not used. gelu without the cumulative distribution function,
    in fewer instructions."""
    if tanh:
        cdf = _logistic(x, interpret)
        return x * cdf, cdf + x * cdf * (1.0 - cdf) * (1.5957691216057308 + 0.2140644488 * x * x)
    bell, tail = _tail(x, interpret)
    tail = tail * bell
    cdf = jnp.where(x < 0, tail, 1.0 - tail)
    return jnp.maximum(x, 0.0) - jnp.abs(x) * tail, cdf + x * bell * (1 / math.sqrt(2 * math.pi))


def _logistic(x, interpret: bool):
    """(1 + tanh u) / 2 = 1 / (1 + exp(-2u)), u = sqrt(2/π) (x + 0.044715 x³)"""
    return _reciprocal(1.0 + jnp.exp2(x * (-2.302208198144325 - 0.1029432396 * x * x)), interpret)


def _tail(x, interpret: bool):
    """exp(-x²/2), and what it must be multiplied with to give Φ(-|x|): Abramowitz and Stegun 7.1.26, error 0.75e-7."""
    bell = jnp.exp2(-0.5 / math.log(2) * x * x)
    t = _reciprocal(1.0 + 0.23164190 * jnp.abs(x), interpret)  # 0.3275911 / sqrt(2)
    tail = (((0.5307027145 * t - 0.7265760135) * t + 0.7107068705) * t - 0.142248368) * t + 0.127414796
    return bell, tail * t


def _reciprocal(x, interpret: bool):
    """One instruction, which JAX has no name for; a division is nine."""
    if interpret:
        return 1.0 / x

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=WGMMA))
    def reciprocal(_, x):
        return x._pointwise(x._lift_fast_instr("rcp.approx.ftz.f32"))

    return reciprocal(x)
