"""Matrix products for NVIDIA Hopper whose epilogue overlaps with the tensor cores; in Pallas (Mosaic GPU).

The kernel is persistent: one thread block per multiprocessor loops over tiles of the result. Its two consumer
warpgroups work on different tiles: while one runs its epilogue, the tensor cores multiply for the other (the ping-pong
schedule of CUTLASS, media/docs/cpp/efficient_gemm.md in its repository). A producer warpgroup loads slices of both
factors into a ring buffer in the order in which the consumers need them, which makes the consumers alternate. Thread
blocks form clusters of two. The blocks of a pair compute tiles above each other and share the right factor's slices, or
tiles next to each other and share the left factor's; each block loads half of a shared slice for both.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 128  # of a tile
SWIZZLE = 128  # bytes: the widest swizzle, and the width of a slice along K
PART = 64  # rows and columns of a tile that the epilogue processes at a time
CONSUMERS = 2  # consumer warpgroups

WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = WGMMA.reduce(0)
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")


def tiles_m(M: int) -> int:
    """Return the rows of tiles, two for each pair of blocks; the last may start beyond M."""
    return 2 * pl.cdiv(M, 2 * ROWS)


@dataclass(frozen=True)
class HopperProduct:
    """A matrix product compiled for one shape.

    M: a multiple of 8.
    N: a multiple of the tile's columns.
    K: a multiple of the slice width `step`.
    dtype: of the factors, 16 bits wide or int8.
    pairs: pairs of thread blocks, one for every two multiprocessors.
    """

    M: int
    N: int
    K: int
    dtype: str
    pairs: int
    interpret: bool = field(default=False, kw_only=True)

    right_is_NK = True  # layout of the right factor: (N, K), else (K, N)
    shares_left = False  # the factor that a pair shares: the left one, else the right one
    registers = 232, 40  # per thread of consumers and producer; the three warpgroups have at most 512

    @property
    def rows(self) -> int:
        """Rows of a tile, a multiple of PART."""
        return ROWS

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Slots of the ring buffer, limited by shared memory."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Width of a slice along K."""
        return SWIZZLE // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        """Slices along K."""
        return self.K // self.step

    @property
    def pair_shape(self) -> tuple[int, int]:
        """Rows and columns of the two tiles that a pair of blocks computes at a time."""
        return (self.rows, 2 * self.columns) if self.shares_left else (2 * self.rows, self.columns)

    @property
    def pair_tiles_m(self) -> int:
        """Pairs of tiles along M; the last may extend beyond M."""
        return pl.cdiv(self.M, self.pair_shape[0])

    @property
    def pair_tiles_n(self) -> int:
        """Pairs of tiles along N."""
        return self.N // self.pair_shape[1]

    def array(self, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
        """Return the type of an array in global memory, by default of the factors' dtype."""
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))

    def shared(self, *shape: int, dtype=None) -> plgpu.SMEM:
        """Return the type of a swizzled buffer in shared memory, by default of the factors' dtype."""
        dtype = jnp.dtype(dtype or self.dtype)
        transforms = plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize)), plgpu.SwizzleTransform(SWIZZLE)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def kernel(self, body, out_type: tuple, scratch: dict):
        """Return the kernel of `body`, with the ring buffer and its barriers added to the scratch buffers."""
        right = (self.columns, self.step) if self.right_is_NK else (self.step, self.columns)
        ring = {
            "left_smem": self.shared(self.stages, self.rows, self.step),
            "right_smem": self.shared(self.stages, *right),
            # One set per consumer: a warpgroup that waits for a barrier must wait for each of its phases.
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=CONSUMERS * self.stages),
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
            num_threads=CONSUMERS + 1,
            thread_name="warpgroup",
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                lowering_semantics=plgpu.LoweringSemantics.Lane,
                # Not needed: a warp reads only shared memory that the copy engine or the same warp wrote.
                unsafe_no_auto_barriers=True,
            ),
            interpret=INTERPRETED if self.interpret else None,
        )

    def tile_count(self):
        """Return the number of tiles that each block of this pair computes."""
        turns = self.pair_tiles_m * self.pair_tiles_n
        return lax.div(turns - lax.axis_index("pair") + self.pairs - 1, jnp.int32(self.pairs))

    def tile(self, i):
        """Return the first row and column of this block's i-th tile.

        All pairs together advance along rows of tiles, so the left factor is read from memory once.
        """
        turn = lax.axis_index("pair") + i * self.pairs
        rows, columns = self.pair_shape
        row = lax.div(turn, jnp.int32(self.pair_tiles_n)) * rows
        column = lax.rem(turn, jnp.int32(self.pair_tiles_n)) * columns
        half = lax.axis_index("half")
        return (row, column + half * self.columns) if self.shares_left else (row + half * self.rows, column)

    def run_warpgroups(self, left_ref, right_ref, ring: dict, compute, prepare=lambda group: None) -> None:
        """Run prepare(group), then compute(group, i) for each tile of a consumer, while the producer loads factors."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < CONSUMERS)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            prepare(warpgroup)

            @pl.loop(0, lax.div(self.tile_count() - warpgroup + CONSUMERS - 1, jnp.int32(CONSUMERS)))
            def _(turn):
                compute(warpgroup, CONSUMERS * turn + warpgroup)

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == CONSUMERS)
        def _():
            plgpu.set_max_registers(self.registers[1], action="decrease")
            self._load(left_ref, right_ref, ring)

    def _load(self, left_ref, right_ref, ring: dict) -> None:
        @pl.loop(0, self.tile_count())
        def _(i):
            row, column = self.tile(i)
            rows, columns = pl.ds(row, self.rows), pl.ds(column, self.columns)

            @pl.loop(0, self.steps)
            def _(k):
                step = i * self.steps + k
                slot = self._slot(step)
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(ring["emptied"].at[slot]))
                filled = ring["filled"].at[lax.rem(i, CONSUMERS) * self.stages + slot]
                inner = pl.ds(k * self.step, self.step)
                right = right_ref.at[(columns, inner) if self.right_is_NK else (inner, columns)]
                shared = {"collective_axes": ("half",)}
                left_how, right_how = (shared, {}) if self.shares_left else ({}, shared)
                plgpu.copy_gmem_to_smem(left_ref.at[rows, inner], ring["left_smem"].at[slot], filled, **left_how)
                plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[slot], filled, **right_how)

        # A block must not exit while the other one can still arrive at its barriers.
        steps = self.tile_count() * self.steps
        pl.loop(lax.max(steps - self.stages, 0), steps)(
            lambda step: plgpu.barrier_wait(ring["emptied"].at[self._slot(step)])
        )

    def _slot(self, step):
        return lax.rem(step, self.stages)

    def multiply(self, acc_ref, group, i, ring: dict):
        """Return the product of tile i in acc_ref's dtype. A slot is freed once the next slice's product started."""

        def step_of(k):
            slot = self._slot(i * self.steps + k)
            plgpu.barrier_wait(ring["filled"].at[group * self.stages + slot])
            right = ring["right_smem"].at[slot]
            plgpu.wgmma(acc_ref, ring["left_smem"].at[slot], right.transpose((1, 0)) if self.right_is_NK else right)

        def free_slot(k):
            plgpu.barrier_arrive(ring["emptied"].at[self._slot(i * self.steps + k)])

        step_of(0)

        @pl.loop(1, self.steps)
        def _(k):
            step_of(k)
            plgpu.wgmma_wait(1)
            free_slot(k - 1)

        plgpu.wgmma_wait(0)
        free_slot(self.steps - 1)
        return acc_ref[...]

    def store(self, group, row, column, buffers, result_refs, results_of) -> None:
        """Store the results of the tile at (row, column) through shared memory.

        results_of(r, c): the part of each result, PART x PART, that starts at (r, c) of the tile.
        buffers: for each result, two parts in shared memory per consumer.
        """
        parts = [(r, c) for c in range(0, self.columns, PART) for r in range(0, self.rows, PART)]
        for count, (r, c) in enumerate(parts):
            results = results_of(r, c)
            slot = count % 2
            plgpu.wait_smem_to_gmem(len(buffers), wait_read_only=True)  # all copies but those of the last part
            for buffer, result in zip(buffers, results, strict=True):
                buffer[group, slot] = result.astype(buffer.dtype)
            plgpu.commit_smem()
            here = pl.ds(row + r, PART), pl.ds(column + c, PART)
            for buffer, result_ref in zip(buffers, result_refs, strict=True):
                plgpu.copy_smem_to_gmem(buffer.at[group, slot], result_ref.at[here])


@dataclass(frozen=True)
class LinearProduct(HopperProduct):
    """x weightᵀ, plus a bias if has_bias; subclasses extend the epilogue."""

    has_bias: bool

    outputs = 1

    @property
    def columns(self) -> int:
        return 192 if self.N % 192 == 0 else 128  # wider tiles read the factors less often

    @property
    def stages(self) -> int:
        return 4 if self.columns == 192 else 6

    def inputs(self) -> tuple:
        factors = self.array(self.M, self.K), self.array(self.N, self.K)
        return (*factors, self.array(self.N, dtype="float32")) if self.has_bias else factors

    def __call__(self, x_MK, weight_NK, *bias_N):
        """Return all outputs, (M, N) each. The bias is float32."""
        out_type = (self.array(self.M, self.N),) * self.outputs
        scratch = {"buffers": (self.shared(CONSUMERS, 2, PART, PART),) * self.outputs}
        return self.kernel(self._body, out_type, scratch)(x_MK, weight_NK, *bias_N)

    def epilogue(self, product) -> tuple:
        """Return a part of each output from the same part of the float32 product."""
        return (product,)

    def _body(self, x_ref, weight_ref, *refs, buffers, **ring):
        bias_ref, result_refs = (refs[0], refs[1:]) if self.has_bias else (None, refs)

        def compute(group, i):
            row, column = self.tile(i)
            acc = pl.run_scoped(
                lambda acc_ref: self.multiply(acc_ref, group, i, ring), plgpu.ACC((ROWS, self.columns), jnp.float32)
            )

            def results_of(r, c):
                part = acc[r : r + PART, c : c + PART]
                if self.has_bias:
                    bias = plgpu.load(bias_ref.at[pl.ds(column + c, PART)], layout=BY_COLUMN, optimized=False)
                    part += lax.broadcast_in_dim(bias, (PART, PART), [1])
                return self.epilogue(part)

            self.store(group, row, column, buffers, result_refs, results_of)

        self.run_warpgroups(x_ref, weight_ref, ring, compute)
