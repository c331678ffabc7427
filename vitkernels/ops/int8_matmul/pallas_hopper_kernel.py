"""A scaled int8 product for NVIDIA Hopper, in Pallas (Mosaic GPU): exact sums, scaled in an overlapped epilogue.

The schedule is that of the 16-bit products (vitkernels.ops.linear.pallas_hopper_kernel): a ring buffer and two
alternating consumer warpgroups. A slice holds twice as many numbers and takes the tensor cores as long, so a tile takes
half the time. The scales and the bias of a tile are therefore copied to shared memory while its sums are computed.

Shape suffixes: M rows (tokens), K the inner dimension of a product, N its columns.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.ops.linear.pallas_hopper_kernel import BY_COLUMN, CONSUMERS, PART, WGMMA, HopperProduct

BY_ROW = WGMMA.reduce(1)
SHARED_MEMORY = 227 * 1024  # bytes per thread block
RESERVED = 2 * 1024  # bytes of it for barriers, and for gaps: every buffer starts at a multiple of 1024


@dataclass(frozen=True)
class Tiling:
    """Rows and columns of a tile, and whether a pair of blocks shares the left factor's slices or the right one's.

    The larger is shared, to read less.
    """

    rows: int
    columns: int
    shares_left: bool = False


# In order of the bytes read, fewest first.
TILINGS = Tiling(192, 128, shares_left=True), Tiling(128, 192), Tiling(64, 256), Tiling(128, 128)


@dataclass(frozen=True)
class ScaledProduct(HopperProduct):
    """(a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias: int8 factors, exact sums, scaled in float32.

    out_dtype: float32 or 16 bits wide. bias_dtype: None without a bias.
    """

    out_dtype: str
    bias_dtype: str | None
    tiling: Tiling

    registers = 240, 24  # the columns' scales and the bias need registers

    @classmethod
    def best(cls, *fields) -> "ScaledProduct":
        """Return the product with the first tiling that minimizes the busiest block's work; fields: all but tiling."""
        candidates = (cls(*fields, tiling) for tiling in TILINGS)
        return min((c for c in candidates if c.N % c.pair_shape[1] == 0), key=lambda c: c.busiest)

    @property
    def rows(self) -> int:
        return self.tiling.rows

    @property
    def columns(self) -> int:
        return self.tiling.columns

    @property
    def stages(self) -> int:
        scales_and_bias = CONSUMERS * 4 * (self.rows + 2 * self.columns)
        results = CONSUMERS * 2 * PART * PART * jnp.dtype(self.out_dtype).itemsize
        room = SHARED_MEMORY - RESERVED - results - scales_and_bias
        return room // ((self.rows + self.columns) * self.step)

    @property
    def shares_left(self) -> bool:
        return self.tiling.shares_left

    @property
    def busiest(self) -> int:
        """Elements that the busiest block computes, including those out of bounds."""
        return pl.cdiv(self.pair_tiles_m * self.pair_tiles_n, self.pairs) * self.rows * self.columns

    def inputs(self) -> tuple:
        factors = self.array(self.M, self.K), self.array(self.N, self.K)
        scales = self.array(self.M, dtype="float32"), self.array(self.N, dtype="float32")
        return (*factors, *scales, self.array(self.N, dtype=self.bias_dtype)) if self.bias_dtype else factors + scales

    def __call__(self, a_MK, b_NK, a_scale_M, b_scale_N, *bias_N):
        """Return (M, N) in out_dtype."""
        vectors = [(self.rows, "float32"), (self.columns, "float32")]
        vectors += [(self.columns, self.bias_dtype)] if self.bias_dtype else []
        scratch = {
            "buffer": self.shared(CONSUMERS, 2, PART, PART, dtype=self.out_dtype),
            "vectors": tuple(plgpu.SMEM((CONSUMERS, length), jnp.dtype(dtype)) for length, dtype in vectors),
            "vectors_arrived": plgpu.Barrier(num_arrivals=len(vectors), num_barriers=CONSUMERS),
        }
        out_type = self.array(self.M, self.N, dtype=self.out_dtype)
        return self.kernel(self._body, out_type, scratch)(a_MK, b_NK, a_scale_M, b_scale_N, *bias_N)

    def _body(self, a_ref, b_ref, *refs, buffer, vectors, vectors_arrived, **ring):
        *vector_refs, out_ref = refs

        def fetch_vectors(group, row, column):
            """Start copying the scales and the bias of the tile at (row, column)."""
            rows, columns = pl.ds(row, self.rows), pl.ds(column, self.columns)
            for ref, smem, here in zip(vector_refs, vectors, (rows, columns, columns), strict=False):
                plgpu.copy_gmem_to_smem(ref.at[here], smem.at[group], vectors_arrived.at[group])

        def part_of_vector(index, group, begin, layout):
            values = plgpu.load(vectors[index].at[group, pl.ds(begin, PART)], layout=layout, optimized=False)
            return lax.broadcast_in_dim(values.astype(jnp.float32), (PART, PART), [0 if layout == BY_ROW else 1])

        def compute(group, i):
            row, column = self.tile(i)
            fetch_vectors(group, row, column)
            sums = pl.run_scoped(
                lambda sums_ref: self.multiply(sums_ref, group, i, ring),
                plgpu.ACC((self.rows, self.columns), jnp.int32),
            )
            plgpu.barrier_wait(vectors_arrived.at[group])

            def results_of(r, c):
                part = sums[r : r + PART, c : c + PART].astype(jnp.float32)
                part *= part_of_vector(0, group, r, BY_ROW)
                part *= part_of_vector(1, group, c, BY_COLUMN)
                if self.bias_dtype:
                    part += part_of_vector(2, group, c, BY_COLUMN)
                return (part,)

            # Its last barrier between the warps of the group follows their last reads of the vectors, which the next
            # tile's copies overwrite.
            self.store(group, row, column, (buffer,), (out_ref,), results_of)

        self.run_warpgroups(a_ref, b_ref, ring, compute)
