"""Values of 97 to 128 columns as one operand of a product, in a forward kernel of `pallas_flash` on Hopper.

A head dim of more than 64 columns is held as parts one swizzle wide (see tiles.tile), and a product with each part
would read the weights once more. wgmma multiplies up to 256 columns, whose groups of 64 may lie any distance apart. So
here the two groups lie below each other in one array, and one product multiplies both.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper.schedule import ROWS, widths
from vitkernels.attention.pallas_flash.hopper.tiles import WGMMA

GROUP = 64  # columns
COLUMNS = 2 * GROUP
_TRANSFORMS = plgpu.TilingTransform((8, GROUP)), plgpu.SwizzleTransform(2 * GROUP)
_SUMS = plgpu.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32, layout=WGMMA)


def are_wide(head_dim: int) -> bool:
    """Return whether the values of this head dim have two groups of 64 columns."""
    return widths(head_dim) == (GROUP, GROUP)


def ring(stages: int, rows: int, dtype) -> tuple:
    """Return scratch for tiles of values, as one part: a tile's first group of columns, and the second below it."""
    return (plgpu.SMEM((stages, 2 * rows, GROUP), dtype, transforms=_TRANSFORMS),)


def start_product(sums: jax.Array, weights: jax.Array, values, interpret: bool) -> jax.Array:
    """Start to add the product of weights (64, K) and the first K rows of a tile of values to sums (64, 128), float32.

    The result must not be read before finish_product. The product counts as one in wait_n of wgmma_accumulator_load.
    """
    rows, count = values.shape[0] // 2, weights.shape[1]
    if interpret:  # the interpreter does not run Mosaic GPU code
        wide = jnp.concatenate([values[pl.ds(first, count)] for first in (0, rows)], axis=1)
        return sums + jnp.dot(weights, wide, preferred_element_type=jnp.float32)

    @plgpu.inline_mgpu(arg_types=(WGMMA, WGMMA, plgpu.RefType(_TRANSFORMS)), return_type=_SUMS)
    def start(_ctx, sums, weights, values):
        blocks = mgpu.memref_reshape(values, (2, rows // 8, 8, GROUP))  # of 8 rows
        tiles = mgpu.memref_slice(mgpu.memref_transpose(blocks, (1, 0, 2, 3)), slice(0, count // 8))
        sums = mgpu.wgmma(mgpu.WGMMAAccumulator.from_registers(sums), weights, tiles, swizzle=2 * GROUP)
        mgpu.utils.inline_ptx("wgmma.commit_group.sync.aligned;", has_side_effects=True)
        return sums.value

    return start(sums, weights, values)


def finish_product(sums: jax.Array, interpret: bool) -> jax.Array:
    """Wait for all products, and return the sums that start_product returned."""
    if interpret:
        return sums

    @plgpu.inline_mgpu(arg_types=(WGMMA,), return_type=_SUMS)
    def finish(_ctx, sums):
        mgpu.utils.inline_ptx("wgmma.wait_group.sync.aligned 0;", has_side_effects=True)
        return mgpu.optimization_barrier(sums)  # lest they be read before

    return finish(sums)
