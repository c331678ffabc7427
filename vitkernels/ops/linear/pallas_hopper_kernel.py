"""Matrix products for NVIDIA Hopper whose epilogue runs behind the tensor cores' work; in Pallas (Mosaic GPU).

A thread block stays on each multiprocessor and goes through tiles of the result. Two of its warpgroups each have a tile
of their own: while one is in its epilogue, the tensor cores multiply for the other (the ping-pong schedule of CUTLASS,
media/docs/cpp/efficient_gemm.md there). A third warpgroup keeps a ring of pieces of both factors filled, in the order
in which the two need them: that is what makes them take turns. Pairs of blocks, one below the other, share the right
factor's pieces, or side by side the left one's: each fetches half of them for both.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns, T tiles of rows.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 128  # of a tile
SWIZZLE = 128  # bytes: the widest, and as wide as that a piece is along K
PART = 64  # rows and columns of a result that an epilogue has in hand at a time
GROUPS = 2  # of warps that multiply

WGMMA = plgpu.Layout.WGMMA
BY_COLUMN = WGMMA.reduce(0)
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")


def tiles_m(M: int) -> int:
    """Rows of tiles, two for each pair of blocks, one below the other; the last may lie beyond M."""
    return 2 * pl.cdiv(M, 2 * ROWS)


@dataclass(frozen=True)
class Product:
    """One product as its kernel is compiled for it: M a multiple of 8, N of a tile's columns, K of a step.

    dtype: of the factors, 16 bits wide or int8. pairs: of thread blocks; one for every two multiprocessors.
    """

    M: int
    N: int
    K: int
    dtype: str
    pairs: int
    interpret: bool = field(default=False, kw_only=True)

    right_is_NK = True  # or (K, N)
    shares_left = False  # or the right factor
    registers = 232, 40  # per thread of the multiplying groups and of the loader; 512 for the three together

    @property
    def rows(self) -> int:
        """Of a tile; a multiple of PART."""
        return ROWS

    @property
    def columns(self) -> int:
        """Of a tile."""
        raise NotImplementedError

    @property
    def stages(self) -> int:
        """Pieces in the ring; what shared memory has room for."""
        raise NotImplementedError

    @property
    def step(self) -> int:
        """Of K: what a piece is wide."""
        return SWIZZLE // jnp.dtype(self.dtype).itemsize

    @property
    def steps(self) -> int:
        return self.K // self.step

    @property
    def pair_shape(self) -> tuple[int, int]:
        """Rows and columns of what a pair of blocks has in hand: two tiles."""
        return (self.rows, 2 * self.columns) if self.shares_left else (2 * self.rows, self.columns)

    @property
    def turns_m(self) -> int:
        """How often a pair's rows fit into M, beyond which the last may reach."""
        return pl.cdiv(self.M, self.pair_shape[0])

    @property
    def turns_n(self) -> int:
        return self.N // self.pair_shape[1]

    def array(self, *shape: int, dtype=None) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype or self.dtype))

    def shared(self, *shape: int, dtype=None) -> plgpu.SMEM:
        dtype = jnp.dtype(dtype or self.dtype)
        transforms = plgpu.TilingTransform((8, SWIZZLE // dtype.itemsize)), plgpu.SwizzleTransform(SWIZZLE)
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    def kernel(self, body, out_type: tuple, scratch: dict):
        right = (self.columns, self.step) if self.right_is_NK else (self.step, self.columns)
        ring = {
            "left_smem": self.shared(self.stages, self.rows, self.step),
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
        turns = self.turns_m * self.turns_n
        return lax.div(turns - lax.axis_index("pair") + self.pairs - 1, jnp.int32(self.pairs))

    def tile(self, i):
        """First row and column of this block's i-th tile; all pairs together go along the rows of tiles, so that the
        left factor comes from memory once."""
        turn = lax.axis_index("pair") + i * self.pairs
        rows, columns = self.pair_shape
        row = lax.div(turn, jnp.int32(self.turns_n)) * rows
        column = lax.rem(turn, jnp.int32(self.turns_n)) * columns
        half = lax.axis_index("half")
        return (row, column + half * self.columns) if self.shares_left else (row + half * self.rows, column)

    def divide_roles(self, left_ref, right_ref, ring: dict, compute, prepare=lambda group: None) -> None:
        """prepare(group), then compute(group, i) for each of its tiles, while their factors arrive."""
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup < GROUPS)
        def _():
            plgpu.set_max_registers(self.registers[0], action="increase")
            prepare(warpgroup)

            @pl.loop(0, lax.div(self.tiles_here() - warpgroup + GROUPS - 1, jnp.int32(GROUPS)))
            def _(turn):
                compute(warpgroup, GROUPS * turn + warpgroup)

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == GROUPS)
        def _():
            plgpu.set_max_registers(self.registers[1], action="decrease")
            self._load(left_ref, right_ref, ring)

    def _load(self, left_ref, right_ref, ring: dict) -> None:
        @pl.loop(0, self.tiles_here())
        def _(i):
            row, column = self.tile(i)
            rows, columns = pl.ds(row, self.rows), pl.ds(column, self.columns)

            @pl.loop(0, self.steps)
            def _(k):
                step = i * self.steps + k
                slot = self._slot(step)
                pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(ring["emptied"].at[slot]))
                filled = ring["filled"].at[lax.rem(i, GROUPS) * self.stages + slot]
                inner = pl.ds(k * self.step, self.step)
                right = right_ref.at[(columns, inner) if self.right_is_NK else (inner, columns)]
                shared = {"collective_axes": ("half",)}
                left_how, right_how = (shared, {}) if self.shares_left else ({}, shared)
                plgpu.copy_gmem_to_smem(left_ref.at[rows, inner], ring["left_smem"].at[slot], filled, **left_how)
                plgpu.copy_gmem_to_smem(right, ring["right_smem"].at[slot], filled, **right_how)

        # No block may end while the other can still report to it.
        steps = self.tiles_here() * self.steps
        pl.loop(lax.max(steps - self.stages, 0), steps)(
            lambda step: plgpu.barrier_wait(ring["emptied"].at[self._slot(step)])
        )

    def _slot(self, step):
        return lax.rem(step, self.stages)

    def multiply(self, acc_ref, group, i, ring: dict):
        """The group's i-th tile, in acc_ref's dtype. A piece is given back once the next one's product has begun."""

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

    def store(self, group, row, column, buffers, result_refs, results_of) -> None:
        """The results of a tile at (row, column), through shared memory.

        results_of(r, c): of each result the part of PART rows and columns that begins there within the tile.
        buffers: for each result two parts in shared memory, of each group.
        """
        parts = [(r, c) for c in range(0, self.columns, PART) for r in range(0, self.rows, PART)]
        for count, (r, c) in enumerate(parts):
            results = results_of(r, c)
            slot = count % 2
            plgpu.wait_smem_to_gmem(len(buffers), wait_read_only=True)  # all but the last part's copies
            for buffer, result in zip(buffers, results, strict=True):
                buffer[group, slot] = result.astype(buffer.dtype)
            plgpu.commit_smem()
            here = pl.ds(row + r, PART), pl.ds(column + c, PART)
            for buffer, result_ref in zip(buffers, result_refs, strict=True):
                plgpu.copy_smem_to_gmem(buffer.at[group, slot], result_ref.at[here])


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

            def results_of(r, c):
                part = acc[r : r + PART, c : c + PART]
                if self.has_bias:
                    bias = plgpu.load(bias_ref.at[pl.ds(column + c, PART)], layout=BY_COLUMN, optimized=False)
                    part += lax.broadcast_in_dim(bias, (PART, PART), [1])
                return self.epilogue(part)

            self.store(group, row, column, buffers, result_refs, results_of)

        self.divide_roles(x_ref, weight_ref, ring, compute)
