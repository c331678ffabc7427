"""What the Hopper kernels of `pallas_flash` share: tiles in shared memory, and how rows get into and out of them.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.core import UnswizzleRef
from jax._src.state import indexing
from jax._src.state.types import ReshapeTransform, TransformedRef
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper.schedule import MULTIPROCESSORS, ROWS, Schedule, widths

LOG2E = math.log2(math.e)
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
BY_COLUMN = WGMMA.reduce(0)


@dataclass(frozen=True)
class Problem:
    """One attention call, as its kernels are compiled for it.

    q, k and v, and their gradients, lie in arrays (B, N or M, all_heads, D), where their H heads begin at first_heads:
    three arrays of H heads, or one of 3 H.
    """

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: str
    scale: float
    is_causal: bool
    all_heads: int
    first_heads: tuple[int, int, int]
    schedule: Schedule | None  # None: the kernel knows only one
    interpret: bool = False
    multiprocessors: int = MULTIPROCESSORS

    @property
    def padded_queries(self) -> int:
        """Length of the rows of log-sum-exp and delta."""
        return padded(self.queries)

    @property
    def copies(self) -> int:
        """In how many parts a row arrives."""
        return len(widths(self.head_dim))

    def zeros(self) -> tuple[jax.Array, ...]:
        """The beginning of a sum of ROWS rows of a head, one part per width."""
        return tuple(filled((ROWS, width), 0, WGMMA) for width in widths(self.head_dim))

    def rows(self, tokens: int, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, tokens, heads, self.head_dim), jnp.dtype(self.dtype))

    def vector(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.padded_queries), jnp.float32)

    def launch(self, body, grid: dict[str, int], warpgroups: int, out_type: tuple, scratch: dict):
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="warpgroup",
            # Lane: there a kernel may say itself how a tile lies in memory (see _untiled).
            compiler_params=plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
            interpret=INTERPRETED if self.interpret else None,
        )


class ByHead(Problem):
    """A problem whose thread blocks stay on their multiprocessor and go from head to head."""

    @property
    def blocks(self) -> int:
        return min(self.multiprocessors, self.batch * self.heads)

    def turns(self):
        """How many heads this block goes through."""
        return lax.div(self.batch * self.heads - 1 - lax.axis_index("block"), self.blocks) + 1

    def head_of(self, turn) -> tuple:
        """Batch entry and head."""
        index = lax.axis_index("block") + turn * self.blocks
        return lax.div(index, self.heads), lax.rem(index, self.heads)


def padded(tokens: int) -> int:
    """Room for 64 rows of each warpgroup of any schedule: a store of a vector knows no bounds."""
    return max(pl.cdiv(tokens, rows) * rows for rows in (192, 256))


def tile(rows: int, head_dim: int, dtype, *leading: int) -> tuple:
    """Scratch for `rows` rows of a head; a tuple, one part per width."""
    return tuple(
        plgpu.SMEM(
            (*leading, rows, width),
            dtype,
            transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(2 * width)),
        )
        for width in widths(head_dim)
    )


def at(parts: tuple, index) -> tuple:
    return tuple(part.at[index] for part in parts)


def transposed(part):
    return part.transpose((1, 0))


def _untiled(part, index, interpret: bool):
    """`part.at[index]` as the TMA unit sees it: rows of one swizzle's width, one after the other.

    Its tiles of (8, width) lie in that very order, so both are one memory. Said this way, because Mosaic GPU copies
    into tiles of 8 rows only from arrays of 8 n rows, and images have 197 or 577 tokens; said as plain rows, the TMA
    unit fills what lies beyond the last token with zeros, and stores nothing there.
    """
    if interpret:  # which knows no tiles
        return part.at[index]
    tiled = part.ref
    whole = (slice(None),) * (len(tiled.shape) - 1)
    indexer = indexing.NDIndexer.from_indices_shape((index, *whole), tiled.shape)
    rows, width = tiled.shape[-4] * tiled.shape[-2], tiled.shape[-1]
    return TransformedRef(tiled, (indexer, ReshapeTransform((rows, width)), UnswizzleRef(2 * width)))


def _columns(array_ref, where: tuple, first_row, rows: int, head, parts: tuple):
    """The slices of `array_ref` (B, N, heads, D) that correspond to the parts of a tile."""
    first_column = 0
    for part in parts:
        width = part.shape[-1]
        columns = pl.ds(_unchecked(first_column), width)
        yield array_ref.at[where, pl.ds(_unchecked(first_row), rows), head, columns]
        first_column += width


def _unchecked(start):
    """A start that JAX cannot see to reach beyond the array; the TMA unit knows what to do there."""
    return start + 0 * lax.axis_index("warpgroup")


def load_rows(array_ref, batch, first_row, head, parts: tuple, index, barrier, interpret: bool) -> None:
    """Starts copying rows of one head into `parts[index]`; the barrier gets one arrival per part."""
    rows = parts[0].shape[-2]
    slices = _columns(array_ref, batch, first_row, rows, head, parts)
    for part, source in zip(parts, slices, strict=True):
        plgpu.copy_gmem_to_smem(source, _untiled(part, index, interpret), barrier)


def store_rows(parts: tuple, index, array_ref, batch, first_row, head, interpret: bool) -> None:
    """Starts copying `parts[index]` out; commit_smem comes before, wait_smem_to_gmem after."""
    rows = parts[0].shape[-2]
    slices = _columns(array_ref, batch, first_row, rows, head, parts)
    for part, destination in zip(parts, slices, strict=True):
        plgpu.copy_smem_to_gmem(_untiled(part, index, interpret), destination)


def first_rows(parts: tuple, rows: int) -> tuple:
    return tuple(part if rows == part.shape[0] else part.at[pl.ds(0, rows)] for part in parts)


def narrow(tokens: int) -> int:
    """The fewest columns of a product that hold that many tokens: the last tile costs what is in it, not 64 or more."""
    return pl.cdiv(tokens, 8) * 8


def widened(x: jax.Array) -> jax.Array:
    """With zeros on the right, up to the next 64 columns: wgmma sums over no fewer in tiles as wide as a swizzle."""
    rows, columns = x.shape
    missing = -columns % ROWS
    return jnp.concatenate([x, filled((rows, missing), 0, WGMMA, x.dtype)], axis=1) if missing else x


def filled(shape: tuple[int, ...], value: float, layout, dtype=jnp.float32) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def row_sums(x_part, y_part) -> jax.Array:
    """rowsum(x y), in float32, of two tiles in shared memory."""
    x, y = (plgpu.load(part, layout=WGMMA).astype(jnp.float32) for part in (x_part, y_part))
    return (x * y).sum(axis=1)


def position(shape, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def products(*factors: tuple[tuple, tuple]) -> tuple[jax.Array, ...]:
    """a bᵀ over the head dim, in float32, for each (a, b) of tiles in shared memory; all in flight together."""

    def multiply(*acc_refs):
        for acc_ref, (a_parts, b_parts) in zip(acc_refs, factors, strict=True):
            for a, b in zip(a_parts, b_parts, strict=True):
                plgpu.wgmma(acc_ref, a, transposed(b))
        return tuple(acc_ref[...] for acc_ref in acc_refs)

    shapes = [(a[0].shape[0], b[0].shape[0]) for a, b in factors]
    return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def accumulated(sums: tuple, products: list[tuple], interpret: bool) -> tuple:
    """`sums` (float32) with sums[i] += a b for each (i, a, b) of `products`; all of them are in flight together.

    a is an array in registers or a tile in shared memory, b a tile in shared memory.
    """
    if interpret:  # which knows no arrays in registers as factors
        sums = list(sums)
        for i, a, b in products:
            sums[i] += jnp.dot(_value(a), b[...], preferred_element_type=jnp.float32)
        return tuple(sums)

    def multiply(acc_refs):
        for i, a, b in products:
            plgpu.wgmma(acc_refs[i], a, b)

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in sums))


def _value(x):
    return x if isinstance(x, jax.Array) else x[...]
