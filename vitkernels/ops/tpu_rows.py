"""Blocks of rows for Pallas TPU kernels over activations (B, N, C), and what their kernels share.

A grid step takes the rows of a few images, with all their channels, and the entire weight of a product. In HBM images
stay apart, so no layout changes if N is not a multiple of 8, and each shard of a batch can run on its own. In VMEM the
images of a block are one matrix: an image's rows are padded to 8, not to the 16 of a bfloat16 register.

Shape suffixes: B images, N tokens, C channels, F features of a product.
"""

import math
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.ops.eight_bit_format import MIN_MAGNITUDE

f32 = jnp.float32
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB
_VMEM_LIMIT_OF_ROUNDING = 80 * 2**20  # of kernels that round their weight: XLA copies the next weight into the rest
_BUDGET = 64 * 2**20  # of blocks, two buffers each; the rest of the limit is for the compiler's spills
_ROWS = 512  # of a block: more hide no more latency and lengthen the compilation
COLUMNS = 256  # of a product that are computed at a time
PIECE = 256  # rows of a product that are computed at a time
_CHUNK = 32  # rows that are prepared between two products
_TILE = 8  # rows of a tile in memory, of any dtype
LEVELS = 127.0  # of int8 on each side of zero
_INTEGERS = 1.5 * 2**23  # added to a small float32, rounds it: the low byte is then the integer, in two's complement


@dataclass(frozen=True)
class RowBlocks:
    """Blocks of `rows` rows of `images` images, which a kernel reads as one matrix of `height` rows.

    A block holds several images only if it holds all their tokens. Rows after an image's last token have any values.
    """

    batch: int
    tokens: int
    images: int
    rows: int

    @classmethod
    def of(
        cls, batch: int, tokens: int, row_bytes: int, resident_bytes: int = 0, most: int | None = None
    ) -> "RowBlocks":
        """Return blocks of about `most` rows, by default 512, and fewer if they would not fit into VMEM.

        row_bytes: of a token in all arrays; resident_bytes: of what every grid step uses, such as a weight.
        """
        fitting = max(16, (_BUDGET - resident_bytes) // (2 * row_bytes))
        most = min(most or _ROWS, fitting // 16 * 16)
        if tokens > most:
            count = pl.cdiv(tokens, most)
            return cls(batch, tokens, 1, _round_up(pl.cdiv(tokens, count), 16))
        rows = _round_up(tokens, _TILE)
        images = max(n for n in range(1, max(1, most // rows) + 1) if batch % n == 0)
        return cls(batch, tokens, images, rows)

    @property
    def grid(self) -> tuple[int, int]:
        return self.batch // self.images, pl.cdiv(self.tokens, self.rows)

    @property
    def height(self) -> int:
        return self.images * self.rows

    def spec(self, width: int) -> pl.BlockSpec:
        """Return the spec of an array (B, N, width)."""
        return pl.BlockSpec((self.images, self.rows, width), lambda i, j: (i, j, 0))

    def sums(self, count: int, width: int) -> pl.BlockSpec:
        """Return the spec of sums over tokens, (B, count, width): those of a block are in its first image's entry."""
        return pl.BlockSpec((self.images, count, width), lambda i, j: (i, 0, 0))

    def pieces(self, most: int = PIECE) -> list[slice]:
        """Return the rows of a block in slices of at most `most` rows."""
        size = _round_up(pl.cdiv(self.height, pl.cdiv(self.height, most)), 16)
        return [slice(start, min(start + size, self.height)) for start in range(0, self.height, size)]

    def inside(self, rows: slice):
        """Return which of these rows are tokens, (rows, 1); None if all are. To be called in a kernel."""
        if self.tokens % self.rows == 0:
            return None
        return self._numbers(rows, axis=1) < self.tokens - pl.program_id(1) * self.rows

    def per_image(self, rows: slice, value):
        """Return value(image) of the image of each of these rows, (rows, 1), or a scalar if all are of one image."""
        first, last = rows.start // self.rows, (rows.stop - 1) // self.rows
        found = value(first)
        for image in range(first + 1, last + 1):
            found = jnp.where(self._numbers(rows, axis=0) < image, found, value(image))
        return found

    def _numbers(self, rows: slice, axis: int):
        """Return the image of each of these rows (axis 0) or its number in the image's rows (axis 1)."""
        numbers = lax.broadcasted_iota(jnp.int32, (self.images, self.rows, 1), axis)
        return numbers.reshape(self.height, 1)[rows]

    def params(self, parallel: bool, vmem_limit: int):
        """Return the compiler's parameters: images in any order if `parallel`, an image's blocks of rows in theirs."""
        images: Literal["parallel", "arbitrary"] = "parallel" if parallel else "arbitrary"
        return pltpu.CompilerParams(dimension_semantics=(images, "arbitrary"), vmem_limit_bytes=vmem_limit)


class Matrix:
    """A block of an array (B, N, width), to be read and written as (height, width); in a kernel."""

    def __init__(self, ref, blocks: RowBlocks):
        self._ref, self._blocks = ref, blocks
        self.shape, self.dtype = (blocks.height, ref.shape[2]), ref.dtype

    def __getitem__(self, at):
        return self._ref.reshape(self.shape)[at]

    def __setitem__(self, at, value):
        """Round rows to the array's dtype and write them, image by image: the interpreter writes no reshaped array.

        Only float32 values can be split at each multiple of 8 rows for free, so they are rounded afterwards.
        """
        rows, columns = at if isinstance(at, tuple) else (at, slice(None))
        size = self._blocks.rows
        for image in range(rows.start // size, (rows.stop - 1) // size + 1):
            start, stop = max(rows.start, image * size), min(rows.stop, (image + 1) * size)
            part = value[start - rows.start : stop - rows.start].astype(self.dtype)
            self._ref[image, start - image * size : stop - image * size, columns] = part


def _round_up(x: int, to: int) -> int:
    return -(-x // to) * to


def size_to_round(weight, dtype) -> int:
    """Return the size of a weight that a product in `dtype` rounds; 0 if it is rounded already."""
    return 0 if weight.dtype in (dtype, jnp.int8) else weight.size


def shared(array) -> pl.BlockSpec:
    """Return the spec of an array that every grid step uses entirely."""
    return pl.BlockSpec(array.shape, lambda i, j: (0,) * array.ndim)


def row_chunks(rows: slice) -> list[slice]:
    """Split the rows of a piece into those that are prepared between two products."""
    starts = range(rows.start, rows.stop, _CHUNK)
    return [slice(start, min(start + _CHUNK, rows.stop)) for start in starts]


def column_cuts(width: int, most: int = COLUMNS) -> list[slice]:
    """Split `width` columns into slices of `most`."""
    return [slice(start, min(start + most, width)) for start in range(0, width, most)]


def product(a, b, b_axis: int):
    """Return a b in float32, contracting the columns of a with axis `b_axis` of b, which is rounded to a's dtype.

    By default the MXU would round float32 factors to bfloat16. Sums of int8 are exact before they become float32.
    """
    dims = (((1,), (b_axis,)), ((), ()))
    b = b.astype(a.dtype)
    if a.dtype == jnp.int8:
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.int32).astype(f32)
    precision = lax.Precision.HIGHEST if a.dtype == f32 else None
    return lax.dot_general(a, b, dims, precision=precision, preferred_element_type=f32)


def quantize(x, axis: int, top=None):
    """Return float32 x as int8 and the scale along `axis`, of size 1 there: x is about q · scale.

    top: the largest magnitude along the axis, if it is known.
    """
    if top is None:
        top = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    top = jnp.maximum(top, MIN_MAGNITUDE)
    shifted = x * (LEVELS / top) + _INTEGERS
    return lax.bitcast_convert_type(shifted, jnp.int32).astype(jnp.int8), top * (1 / LEVELS)


def eight_bit_scratch(blocks: RowBlocks, width: int) -> list:
    """Return scratch memory for a block of int8 rows and for their scales."""
    shapes = ((width, jnp.int8), (1, f32))
    return [pltpu.VMEM((blocks.height, columns), dtype) for columns, dtype in shapes]


def clear_sums(ref) -> None:
    """Set sums to zero at the first block of an image's rows."""

    @pl.when(pl.program_id(1) == 0)
    def _():
        ref[...] = jnp.zeros_like(ref)


def sum_rows(x, inside):
    """Return the sums over the rows that are inside, (1, columns)."""
    x = x if inside is None else jnp.where(inside, x, 0.0)
    return jnp.sum(x, axis=0, keepdims=True)


def row_bytes(*widths_and_dtypes) -> int:
    """Return the bytes of one row of arrays of these (width, dtype)s in VMEM."""
    return sum(_round_up(width, 128) * jnp.dtype(dtype).itemsize for width, dtype in widths_and_dtypes)


# ---------------------------------------------------------------------------------------------------------------------
# GELU
# ---------------------------------------------------------------------------------------------------------------------

# Φ(x) = (1 + tanh(x (c0 + c1 x² + ...))) / 2, fitted: x Φ(x) is off by at most 3.1e-6, which is 1/100 of bfloat16's
# rounding of 0.1. Half the operations of erf's usual approximations, so that it hides behind a product.
_TANH_SERIES = (0.797828157069476, 0.036468758722659186, -0.00012484797601983535, -3.058304888788409e-05,
                1.119177219584608e-06)  # fmt: skip


def gelu_and_slope(x, tanh: bool, exact: bool = True):
    """Return gelu(x) and gelu'(x) in float32.

    Args:
        tanh: the approximation of Hendrycks and Gimpel, not x Φ(x).
        exact: compute Φ to float32's precision. Mosaic has no erf, so Φ(-|x|) follows Abramowitz and Stegun 7.1.26
            (error 0.75e-7). Otherwise to an error of 7e-6, for results that are rounded to bfloat16.
    """
    if tanh:
        scale = math.sqrt(2 / math.pi)
        cdf = 0.5 * (1.0 + jnp.tanh(scale * x * (1.0 + 0.044715 * x * x)))
        return x * cdf, cdf + x * cdf * (1.0 - cdf) * (2 * scale) * (1.0 + 3 * 0.044715 * x * x)
    square = x * x
    if not exact:
        series = jnp.full_like(x, _TANH_SERIES[-1])
        for c in _TANH_SERIES[-2::-1]:
            series = series * square + c
        cdf = 0.5 + 0.5 * jnp.tanh(x * series)
        bell = jnp.exp2(square * (-0.5 * math.log2(math.e)) - 0.5 * math.log2(2 * math.pi))
        return x * cdf, cdf + x * bell
    bell = jnp.exp(-0.5 * square)
    t = 1.0 / (1.0 + 0.3275911 / math.sqrt(2) * jnp.abs(x))
    tail = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * tail * bell
    cdf = jnp.where(x < 0, tail, 1.0 - tail)
    return x * cdf, cdf + x * bell / math.sqrt(2 * math.pi)


def call(
    kernel,
    blocks: RowBlocks,
    inputs,
    in_specs,
    outputs,
    name: str,
    scratch=(),
    *,
    rounds: int = 0,
    parallel: bool = True,
):
    """Run a kernel over the blocks.

    Args:
        outputs: [(spec, shape, dtype), ...]. scratch: arrays in VMEM.
        rounds: size of the weight, if the kernel rounds it. It is then an argument of the program, which XLA copies
            into VMEM ahead of the kernel if it knows how long the kernels before take.
    """
    shapes = [jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs]
    cost, vmem_limit = None, VMEM_LIMIT
    if rounds:
        flops = 2 * blocks.batch * blocks.tokens * rounds
        moved = sum(math.prod(x.shape) * x.dtype.itemsize for x in (*inputs, *shapes))
        cost = pl.CostEstimate(flops=flops, bytes_accessed=moved, transcendentals=0)
        vmem_limit = _VMEM_LIMIT_OF_ROUNDING
    return pl.pallas_call(
        kernel,
        grid=blocks.grid,
        in_specs=in_specs,
        out_specs=[spec for spec, _, _ in outputs],
        out_shape=shapes,
        scratch_shapes=list(scratch),
        compiler_params=blocks.params(parallel, vmem_limit),
        cost_estimate=cost,
        name=name,
    )(*inputs)
