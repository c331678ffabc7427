"""The programs behind the published timings of validate.py, as far as they can be built here."""

from functools import partial
from typing import Any

import numpy as np

from vitkernels.bridge.jax_compat import jax

_SPARSE = (512, 512, 1024)  # rows, columns and depth of a block in JAX's notebook on sparse kernels


def build(kind: str, *sizes: int | str):
    """Return the arguments of `compile_jax` for a case.

    Args:
        kind: one of `KINDS`.
        sizes: the arguments of its function.
    """
    case: Any = KINDS[kind]
    return case(*sizes)


def _square(size: int, dtype: str = "bfloat16", count: int = 2) -> list[Any]:
    return [jax.ShapeDtypeStruct((size, size), dtype)] * count


def _xla(size: int):
    return jax.numpy.matmul, _square(size)


def _product(rows: int, columns: int, depth: int, dtype: str):
    """XLA's product in `dtype`; of int8, in int32."""
    result = "int32" if dtype == "int8" else dtype
    function = partial(jax.numpy.matmul, preferred_element_type=result)
    return function, [jax.ShapeDtypeStruct(shape, dtype) for shape in ((rows, depth), (depth, columns))]


def _relu_apart(size: int):
    """XLA's product in float32, then ReLU in an operation of its own, as two eager calls compute them."""

    def function(x, y):
        return jax.numpy.maximum(jax.lax.optimization_barrier(x @ y), 0)

    return function, _square(size, "float32")


def _blocked(size: int, *block: int):
    from vitkernels.bridge.examples import quickstart

    blocked: Any = quickstart.matmul_jax
    return partial(blocked, block=block), _square(size)


def _summed_in_result(size: int, *block: int):
    """A product in blocks of (rows, columns, depth) whose float32 result holds the sums; XLA rounds it afterwards."""
    from jax.experimental import pallas as pl

    rows, columns, depth = block

    def kernel(x_ref, y_ref, o_ref):
        @pl.when(pl.program_id(2) == 0)
        def _():
            o_ref[...] = jax.numpy.zeros_like(o_ref)

        o_ref[...] += jax.numpy.dot(x_ref[...], y_ref[...], preferred_element_type="float32")

    call = pl.pallas_call(
        kernel,
        grid=(size // rows, size // columns, size // depth),
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k: (i, k)),
            pl.BlockSpec((depth, columns), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k: (i, j)),
        out_shape=jax.ShapeDtypeStruct((size, size), "float32"),
    )
    return (lambda x, y: call(x, y).astype(x.dtype)), _square(size)


def _swiglu(tokens: int, channels: int, hidden: int, rows: int, columns: int):
    """silu(x gate) · (x up), in blocks of rows and columns with the entire depth."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, gate_ref, up_ref, o_ref):
        gate, up = (jax.numpy.dot(x_ref[...], ref[...], preferred_element_type="float32") for ref in (gate_ref, up_ref))
        o_ref[...] = (jax.nn.silu(gate) * up).astype(o_ref.dtype)

    weight = pl.BlockSpec((channels, columns), lambda i, j: (0, j))
    result = jax.ShapeDtypeStruct((tokens, hidden), "bfloat16")
    call = pl.pallas_call(
        kernel,
        grid=(tokens // rows, hidden // columns),
        in_specs=[pl.BlockSpec((rows, channels), lambda i, j: (i, 0)), weight, weight],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j: (i, j)),
        out_shape=result,
    )
    shapes = (tokens, channels), (channels, hidden), (channels, hidden)
    return call, [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in shapes]


def _rms_norm(tokens: int, channels: int, rows: int):
    """x + y and its RMS norm, `rows` tokens at a time."""
    from jax.experimental import pallas as pl

    def kernel(x_ref, y_ref, weight_ref, norm_ref, total_ref):
        x, y, weight = (ref[...].astype("float32") for ref in (x_ref, y_ref, weight_ref))
        total = x + y
        scale = jax.numpy.sqrt(jax.numpy.mean(total * total, axis=-1, keepdims=True) + 1e-6)
        norm_ref[...] = (total / scale * weight[None]).astype(norm_ref.dtype)
        total_ref[...] = total.astype(total_ref.dtype)

    block = pl.BlockSpec((rows, channels), lambda i: (i, 0))
    array = jax.ShapeDtypeStruct((tokens, channels), "bfloat16")
    weight = jax.ShapeDtypeStruct((channels,), "bfloat16")
    call = pl.pallas_call(
        kernel,
        grid=(tokens // rows,),
        in_specs=[block, block, pl.BlockSpec((channels,), lambda i: (0,))],
        out_specs=[block, block],
        out_shape=[array, array],
    )
    return call, [array, array, weight]


def _masked(size: int):
    """XLA's mask · (x @ y), with a mask of int32."""
    return (lambda mask, x, y: mask * (x @ y)), [*_square(size, "int32", 1), *_square(size)]


def _flash(images: int, heads: int, tokens: int, head_dim: int, block: int = 0):
    """JAX's flash attention; block: tokens of a block, 0 for the kernel's own."""
    from jax.experimental.pallas.ops.tpu import flash_attention as flash

    array, sizes = jax.ShapeDtypeStruct((images, heads, tokens, head_dim), "bfloat16"), None
    if block:
        names = ("block_q", "block_k_major", "block_k")
        sizes = flash.BlockSizes(block_b=1, **dict.fromkeys(names, block))
    return partial(flash.flash_attention, sm_scale=head_dim**-0.5, block_sizes=sizes), [array] * 3


def sparse_scalars(size: int) -> list[np.ndarray]:
    """Return what the sparse kernel prefetches for a lower triangular mask: per block of the result, in rows.

    Whether it is computed; the kind of mask block (0 full, 1 on the diagonal), and the row and the column of the next
    block to compute, at or after this one.
    """
    rows, columns = size // _SPARSE[0], size // _SPARSE[1]
    i, j = np.divmod(np.arange(rows * columns), columns)
    computed, last = j <= i, i == rows - 1
    next_i, next_j = np.where(computed | last, i, i + 1), np.where(computed, j, np.where(last, columns - 1, 0))
    return [x.astype(np.int32) for x in (computed, next_i == next_j, next_i, next_j)]


def _sparse(size: int):
    """A product that skips the blocks above the diagonal; scalars name the next block to compute."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    rows, columns, depth = _SPARSE
    grid, wide = (size // rows, size // columns, size // depth), size // columns

    def kernel(computed_ref, kind_ref, i_ref, j_ref, x_ref, y_ref, mask_ref, o_ref, sum_ref):
        k, last = pl.program_id(2), pl.num_programs(2) - 1

        @pl.when(k == 0)
        def _():
            o_ref[...] = jax.numpy.zeros_like(o_ref)
            sum_ref[...] = jax.numpy.zeros_like(sum_ref)

        @pl.when(computed_ref[pl.program_id(0) * wide + pl.program_id(1)] != 0)
        def _():
            sum_ref[...] += jax.numpy.dot(x_ref[...], y_ref[...], preferred_element_type="float32")

            @pl.when(k == last)
            def _():
                o_ref[...] = (mask_ref[0] * sum_ref[...]).astype(o_ref.dtype)

    def depth_of(i, j, k, computed):
        return jax.numpy.where(computed[i * wide + j] != 0, k, 0)

    specification = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=4,
        grid=grid,
        in_specs=[
            pl.BlockSpec((rows, depth), lambda i, j, k, c, m, ii, jj: (ii[i * wide + j], depth_of(i, j, k, c))),
            pl.BlockSpec((depth, columns), lambda i, j, k, c, m, ii, jj: (depth_of(i, j, k, c), jj[i * wide + j])),
            pl.BlockSpec((1, rows, columns), lambda i, j, k, c, m, ii, jj: (m[i * wide + j], 0, 0)),
        ],
        out_specs=pl.BlockSpec((rows, columns), lambda i, j, k, *_: (i, j)),
        scratch_shapes=[pltpu.VMEM((rows, columns), jax.numpy.float32)],
    )
    call = pl.pallas_call(kernel, grid_spec=specification, out_shape=jax.ShapeDtypeStruct((size, size), "bfloat16"))
    scalars = [jax.ShapeDtypeStruct((grid[0] * grid[1],), "int32")] * 4
    return call, [*scalars, *_square(size), jax.ShapeDtypeStruct((2, rows, columns), "int32")]


KINDS = {
    "xla": _xla, "product": _product, "relu": _relu_apart, "pallas": _blocked, "summed": _summed_in_result,
    "swiglu": _swiglu, "rms_norm": _rms_norm, "masked": _masked, "flash": _flash, "sparse": _sparse,
}  # fmt: skip
