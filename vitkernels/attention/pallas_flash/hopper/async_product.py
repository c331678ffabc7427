"""Products that a Hopper kernel of `pallas_flash` starts and later finishes: an array in registers by streamed rows.

Meanwhile, the kernel computes the next operand. Pallas can do so too, but each of its products multiplies one group of
up to 64 columns (see tiles.tile), so that at head dims above 64 each group would read the first operand once more, and
contracts over a multiple of the group's width. wgmma multiplies up to 256 columns, whose groups of 64 may lie any
distance apart, and contracts over 16 rows. So here groups of 64 columns lie below each other in one part, and one
product multiplies all columns of a part.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu.mma_utils import create_descriptor
from jax.experimental.mosaic.gpu.wgmma import wgmma_fence, wgmma_m64
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import tiles
from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, widths
from vitkernels.attention.pallas_flash.hopper.tiles import WGMMA, filled

STEP = 16  # rows that one instruction multiplies
_GROUP = 64  # columns, at most
_ACCUMULATORS = mgpu.fragmented_array.WGMMA_LAYOUT_ACC_32BIT


def ring(stages: int, rows: int, head_dim: int, dtype) -> tuple:
    """Return scratch for streamed tiles: one part of all groups of 64 columns, and one of a narrower group if any."""
    parts = []
    for width, groups in _parts(head_dim):
        shape = (stages, groups * rows, width)
        parts.append(plgpu.SMEM(shape, dtype, transforms=_transforms(width)))
    return tuple(parts)


def zeros(head_dim: int) -> tuple:
    """Return sums of products with nothing added yet: for each part of a ring, (64, columns) in float32."""
    return tuple(filled((ROWS, width * groups), 0, WGMMA) for width, groups in _parts(head_dim))


def _parts(head_dim: int) -> list[tuple[int, int]]:
    """Return the width of the groups, and their number, for each part."""
    all_widths = widths(head_dim)
    return [(width, all_widths.count(width)) for width in dict.fromkeys(all_widths)]


def _transforms(width: int) -> tuple:
    return plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)


def groups(parts: tuple, rows: int, count: int) -> tuple:
    """Return the first `count` of a tile's `rows` rows, one reference per group of columns."""
    return tuple(part.at[pl.ds(first, count)] for part in parts for first in range(0, part.shape[0], rows))


def by_group(sums: tuple) -> tuple:
    """Return sums of products, one array per group of columns."""
    return tuple(x[:, first : first + _GROUP] for x in sums for first in range(0, x.shape[1], _GROUP))


def operand(x: jax.Array, dtype) -> jax.Array:
    """Round x, and pad it with columns of zeros to a multiple of STEP."""
    return tiles.widened(x.astype(dtype), STEP)


def start(sums: tuple, x: jax.Array, parts: tuple, interpret: bool, first: int = 0) -> tuple:
    """Start to add to sums, for each part, the product of x (64, K) and the K rows of a tile from `first` on.

    K and `first` must be multiples of STEP. What is returned must not be read before `finish`, but more can be added to
    it. In wait_n of wgmma_accumulator_load, each part counts as one.
    """
    assert x.shape[1] % STEP == 0 and first % STEP == 0, "wgmma would ignore columns, or multiply other rows"
    return tuple(_start(total, x, part, interpret, first) for total, part in zip(sums, parts, strict=True))


def finish(sums: tuple, interpret: bool) -> tuple:
    """Wait for all products, and return the sums that `start` returned."""
    return sums if interpret else tuple(map(_finish, sums))


def _start(total: jax.Array, x: jax.Array, part, interpret: bool, first: int) -> jax.Array:
    count, width = x.shape[1], part.shape[1]
    rows = part.shape[0] * width // total.shape[1]
    assert first + count <= rows, "these are rows of the next group of columns"
    if interpret:  # the interpreter does not run Mosaic GPU code
        y = [part[pl.ds(group + first, count)] for group in range(0, part.shape[0], rows)]
        return total + jnp.dot(x, jnp.concatenate(y, axis=1), preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA, plgpu.RefType(_transforms(width))), return_type=_like(total))
    def multiply(_ctx, total, x, part):
        blocks = mgpu.memref_reshape(part, (total.shape[1] // width, rows // 8, 8, width))  # of 8 rows
        blocks = mgpu.memref_transpose(blocks, (1, 0, 2, 3))
        total = _multiplied(total, x, mgpu.memref_slice(blocks, slice(first // 8, (first + count) // 8)))
        mgpu.utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
        return total

    return multiply(total, x, part)


def _finish(total: jax.Array) -> jax.Array:
    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=_like(total))
    def wait(_ctx, total):
        mgpu.utils.inline_ptx("wgmma.wait_group.sync.aligned 0;", has_side_effects=True)
        return mgpu.optimization_barrier(total)  # lest it be read before

    return wait(total)


def _like(total: jax.Array):
    return plgpu.ShapeDtypeStruct(total.shape, jnp.float32, layout=WGMMA)


def _multiplied(total: mgpu.FragmentedArray, x: mgpu.FragmentedArray, blocks) -> mgpu.FragmentedArray:
    """Issue the instructions. blocks: (blocks of 8 rows, groups of columns, 8, width of a group).

    mgpu.wgmma does the same for multiples of 64 rows.
    """
    columns, dtype, width = total.shape[1], x.mlir_dtype, blocks.type.shape[-1]
    (descriptor, (_, (stride,))), *_ = create_descriptor(blocks, 2 * width, (STEP, columns), logical_k_major=True)
    total, x = wgmma_fence(total.to_layout(_ACCUMULATORS)), wgmma_fence(x)
    registers = total.registers
    for i in range(x.shape[1] // STEP):
        row = mgpu.utils.c(i * stride // 16, descriptor.type)  # descriptors count 16 bytes
        registers = wgmma_m64(
            registers,
            x[:, i * STEP : (i + 1) * STEP],
            mgpu.utils.arith.addi(descriptor, row),
            a_transpose=None,
            b_transpose=True,
            a_k_stride=None,
            b_k_stride=stride,
            n=columns,
            swizzle=2 * STEP,  # so that it issues one instruction; the descriptor holds that of the rows
            a_element_type=dtype,  # type: ignore[call-arg]  # jax 0.7.1, which mypy reads, has one element_type
            b_element_type=dtype,
        )
    total = mgpu.FragmentedArray(_registers=registers, _layout=total.layout, _is_signed=None)
    return total.to_layout(mgpu.WGMMA_LAYOUT)
