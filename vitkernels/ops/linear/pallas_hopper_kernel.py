"""Matrix products for NVIDIA Hopper whose epilogue runs behind the tensor cores' work; in Pallas (Mosaic GPU).

A thread block stays on each multiprocessor and goes through tiles of the result. Two of its warpgroups each have a tile
of their own: while one is in its epilogue, the tensor cores multiply for the other (the ping-pong schedule of CUTLASS,
media/docs/cpp/efficient_gemm.md there). A third warpgroup keeps a ring of pieces of both factors filled, in the order
in which the two need them: that is what makes them take turns. Pairs of blocks, one below the other, share the right
factor's pieces: each fetches half of them for both.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

from dataclasses import dataclass, field

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

    pairs: of thread blocks; one for every two multiprocessors.
    """

    M: int
    N: int
    K: int
    dtype: str
    pairs: int
    interpret: bool = field(default=False, kw_only=True)

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


@dataclass(frozen=True)
class Linear(Product):
    """x weightᵀ + bias, or without a bias; a subclass may make more of it."""

    has_bias: bool

    outputs = 1

    @property
    def columns(self) -> int:
        return 192 if self.N % 192 == 0 else 128  # the fewer tiles, the less both factors are read

    @property
    def stages(self) -> int:
        return 4 if self.columns == 192 else 6

    def inputs(self) -> tuple:
        factors = self.array(self.M, self.K), self.array(self.N, self.K)
        return (*factors, self.array(self.N, dtype="float32")) if self.has_bias else factors

    def __call__(self, x_MK, weight_NK, *bias_N):
        """All outputs, (M, N) each. The bias is float32."""
        out_type = (self.array(self.M, self.N),) * self.outputs
        scratch = {"buffers": (self.shared(GROUPS, 2, PART, PART),) * self.outputs}
        return self.kernel(self._body, out_type, scratch)(x_MK, weight_NK, *bias_N)

    def epilogue(self, product) -> tuple:
        """A part of each output, of the same part of the product in float32."""
        return (product,)

    def _body(self, x_ref, weight_ref, *refs, buffers, **ring):
        bias_ref, result_refs = (refs[0], refs[1:]) if self.has_bias else (None, refs)

        def compute(group, i):
            row, column = self.tile(i)
            acc = pl.run_scoped(
                lambda acc_ref: self.multiply(acc_ref, group, i, ring), plgpu.ACC((ROWS, self.columns), jnp.float32)
            )
            parts = [(r, c) for c in range(0, self.columns, PART) for r in range(0, ROWS, PART)]
            for count, (r, c) in enumerate(parts):
                part = acc[r : r + PART, c : c + PART]
                if self.has_bias:
                    bias = plgpu.load(bias_ref.at[pl.ds(column + c, PART)], layout=BY_COLUMN, optimized=False)
                    part += lax.broadcast_in_dim(bias, (PART, PART), [1])
                results = self.epilogue(part)
                slot = count % 2
                plgpu.wait_smem_to_gmem(self.outputs, wait_read_only=True)  # all but the last part's copies
                for buffer, result in zip(buffers, results, strict=True):
                    buffer[group, slot] = result.astype(self.dtype)
                plgpu.commit_smem()
                here = pl.ds(row + r, PART), pl.ds(column + c, PART)
                for buffer, result_ref in zip(buffers, result_refs, strict=True):
                    plgpu.copy_smem_to_gmem(buffer.at[group, slot], result_ref.at[here])

        self.divide_roles(x_ref, weight_ref, ring, compute)
