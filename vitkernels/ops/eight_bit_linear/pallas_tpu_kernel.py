"""The gradient of a weight in 8 bits for TPU, and weights in 8 bits for the kernels of the other products.

Its sum is over tokens, so scales per token do not factor out. A grid step takes the rows of a few images, rounds each
column of both operands to int8 with the scale of these rows, multiplies, and adds the scaled product to float32 sums
that stay in VMEM. So each operand is read once, and no pass over all tokens precedes the product.

Shape suffixes: B images, N tokens, F output features, K input features, C columns of the narrower operand, W of the
wider.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.bridge.pallas_schedule import pipelined
from vitkernels.ops.tpu_rows import COLUMNS, Matrix, RowBlocks, call, column_cuts, f32, quantize, row_bytes

_ROWS = 1024  # of a block: each adds the product's sums to those in VMEM once
_CHUNK = 64  # rows that are read at a time, and that registers hold
_DEPTH = 128  # rows that the MXU multiplies at a time


def weight_gradient(dy_BNF, x_BNK):
    """Return dyᵀ x in float32, (1, F, K): the leading 1 is for the sums of one shard of the images.

    Only the narrower operand is transposed for the product. If that is x, the sums are transposed once at the end, so
    that the optimizer need not.
    """
    narrow, wide = (dy_BNF, x_BNK) if dy_BNF.shape[2] <= x_BNK.shape[2] else (x_BNK, dy_BNF)
    B, N, C = narrow.shape
    W = wide.shape[2]
    blocks = RowBlocks.of(B, N, row_bytes((C, narrow.dtype), (W, wide.dtype)), C * W * 4, most=_ROWS)
    depth = -(-blocks.height // _DEPTH) * _DEPTH
    scratch = [pltpu.VMEM(shape, jnp.int8) for shape in ((depth, C), (C, depth), (depth, W))]
    shape = (1, C, W)
    if narrow is x_BNK:
        shape = (1, W, C)
        scratch.append(pltpu.VMEM((1, C, W), f32))
    sums = pl.BlockSpec(shape, lambda i, j: (0, 0, 0))
    return call(
        partial(_kernel, blocks=blocks),
        blocks, (narrow, wide), [blocks.spec(C), blocks.spec(W)], [(sums, shape, f32)],
        "eight_bit_weight_gradient", scratch, parallel=False,
    )[0]  # fmt: skip


def _kernel(narrow_ref, wide_ref, out_ref, narrow_q, transposed_q, wide_q, *scratch, blocks: RowBlocks):
    (sums_ref,) = scratch or (out_ref,)
    narrow_rows, wide_rows = Matrix(narrow_ref, blocks), Matrix(wide_ref, blocks)

    @pl.when((pl.program_id(0) == 0) & (pl.program_id(1) == 0))
    def _():
        sums_ref[...] = jnp.zeros_like(sums_ref)
        narrow_q[...] = jnp.zeros_like(narrow_q)  # the last rows are no block's, but the product reads them
        wide_q[...] = jnp.zeros_like(wide_q)

    read = partial(_round_columns, blocks=blocks)
    narrow_scales = []
    for cut in column_cuts(narrow_ref.shape[2]):
        narrow_scales.append(read(narrow_rows, narrow_q, cut).T)
        transposed_q[cut] = narrow_q[:, cut].T
    narrow_scale = jnp.concatenate(narrow_scales, 0)

    # The next columns are rounded, and the last product is added, while the MXU multiplies the current columns.
    cuts = column_cuts(wide_ref.shape[2])
    scales = [read(wide_rows, wide_q, cuts[0])]

    def multiply(n: int):
        dims = (((1,), (0,)), ((), ()))
        product = lax.dot_general(transposed_q[...], wide_q[:, cuts[n]], dims, preferred_element_type=jnp.int32)
        if n + 1 < len(cuts):
            scales.append(read(wide_rows, wide_q, cuts[n + 1]))
        return product

    def add(n: int, product):
        sums_ref[0, :, cuts[n]] += product.astype(f32) * scales[n] * narrow_scale

    pipelined(range(len(cuts)), multiply, add)
    if not scratch:
        return

    @pl.when((pl.program_id(0) == blocks.grid[0] - 1) & (pl.program_id(1) == blocks.grid[1] - 1))
    def _():
        for cut in cuts:
            out_ref[0, cut] = sums_ref[0, :, cut].T


def _round_columns(ref, out_ref, cut: slice, *, blocks: RowBlocks):
    """Write columns of a block as int8, zeros for rows that are no tokens; return their scale (1, C)."""
    chunks = [slice(start, min(start + _CHUNK, blocks.height)) for start in range(0, blocks.height, _CHUNK)]

    def value(rows):
        x, inside = ref[rows, cut].astype(f32), blocks.inside(rows)
        return x if inside is None else jnp.where(inside, x, 0.0)

    largest: dict[int, jnp.ndarray] = {}  # of the chunks with this number of rows, element by element
    for rows in chunks:
        x, size = jnp.abs(value(rows)), rows.stop - rows.start
        largest[size] = jnp.maximum(largest[size], x) if size in largest else x
    tops = [jnp.max(x, axis=0, keepdims=True) for x in largest.values()]
    top = tops[0] if len(tops) == 1 else jnp.maximum(*tops)
    for rows in chunks:
        out_ref[rows, cut], scale = quantize(value(rows), axis=0, top=top)
    return scale


def round_weight(weight_FK, *, transposed: bool):
    """Return a weight in int8 and its scales for a product that contracts its rows.

    Args:
        transposed: return the weight as (1, K, F), with scales (1, 1, F), for the forward product; otherwise as
            (1, F, K), with scales (1, 1, K), for the gradient of its input.
    """
    q, scale = quantize(weight_FK.astype(f32).T if transposed else weight_FK.astype(f32), axis=0)
    return q[None], scale[None]


assert COLUMNS % _DEPTH == 0  # slices of the transposed operand begin at a register
