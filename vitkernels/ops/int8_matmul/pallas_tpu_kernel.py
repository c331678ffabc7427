"""A blocked product in Pallas for TPU: int8 with int32 sums, and for comparison bfloat16 with float32 sums.

The sums of an output block stay in VMEM while the grid advances along K. If the matrix is not a multiple of the block,
the last blocks extend past its edge: rows and columns out of bounds are not stored, and values beyond K are zeroed.

Shape suffixes: M rows, K the summed dimension, N columns.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB


@dataclass(frozen=True)
class MatmulBlocks:
    """Rows, depth and columns of a block."""

    m: int
    k: int
    n: int


def choose_blocks(M: int, K: int, N: int, dtype: str) -> MatmulBlocks:
    """Return the fastest blocks according to libtpu's schedules for v5e, at most as large as the matrices."""
    large = MatmulBlocks(1024, 2048 if dtype == "int8" else 1024, 1024)
    # Small matrices need several blocks for copies to overlap with products.
    wanted = MatmulBlocks(512, 1024, 512) if max(M, N) <= 1024 else large
    return MatmulBlocks(min(wanted.m, M), min(wanted.k, K), min(wanted.n, N))


def matmul(x_MK, w, *, transposed: bool = False, blocks: MatmulBlocks | None = None):
    """Return x w: int8 to int32, or bfloat16 to bfloat16. w is (K, N), or (N, K) if transposed."""
    M, K = x_MK.shape
    N = w.shape[0 if transposed else 1]
    if N == 1:  # Mosaic does not support integer products with a single row as (N, K)
        w, transposed = w.reshape(K, 1), False
    blocks = blocks or choose_blocks(M, K, N, x_MK.dtype.name)
    is_int = x_MK.dtype == jnp.int8
    sums = jnp.int32 if is_int else jnp.float32
    w_block = (blocks.n, blocks.k) if transposed else (blocks.k, blocks.n)
    return pl.pallas_call(
        partial(_kernel, K=K, transposed=transposed),
        grid=(pl.cdiv(M, blocks.m), pl.cdiv(N, blocks.n), pl.cdiv(K, blocks.k)),
        in_specs=[
            pl.BlockSpec((blocks.m, blocks.k), lambda m, n, k: (m, k)),
            pl.BlockSpec(w_block, (lambda m, n, k: (n, k)) if transposed else (lambda m, n, k: (k, n))),
        ],
        out_specs=pl.BlockSpec((blocks.m, blocks.n), lambda m, n, k: (m, n)),
        out_shape=jax.ShapeDtypeStruct((M, N), jnp.int32 if is_int else x_MK.dtype),
        scratch_shapes=[pltpu.VMEM((blocks.m, blocks.n), sums)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
    )(x_MK, w)


def _kernel(x_ref, w_ref, out_ref, sums_ref, *, K: int, transposed: bool):
    step, last = pl.program_id(2), pl.num_programs(2) - 1
    k_axis = 1 if transposed else 0
    rest = K % x_ref.shape[1]

    @pl.when(step == 0)
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)

    def add(x, w):
        dims = (((1,), (k_axis,)), ((), ()))
        sums_ref[...] += lax.dot_general(x, w, dims, preferred_element_type=sums_ref.dtype)

    if rest:
        pl.when(step < last)(lambda: add(x_ref[...], w_ref[...]))
        pl.when(step == last)(lambda: add(_zero_from(x_ref[...], 1, rest), _zero_from(w_ref[...], k_axis, rest)))
    else:
        add(x_ref[...], w_ref[...])

    @pl.when(step == last)
    def _():
        out_ref[...] = sums_ref[...].astype(out_ref.dtype)


def _zero_from(x, axis: int, valid: int):
    """Return x with zeros from index `valid` on."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, axis) < valid, x, jnp.zeros_like(x))
