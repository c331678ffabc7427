"""Shared parts of the Hopper kernels of `pallas_flash`: tiles in shared memory, their loads, stores and products.

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
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from vitkernels.attention.pallas_flash.hopper import groups
from vitkernels.attention.pallas_flash.hopper.chunks import COUNTS, FIELDS
from vitkernels.attention.pallas_flash.hopper.schedule import MULTIPROCESSORS, ROWS, Schedule, widths

LOG2E = math.log2(math.e)
LOW = -(2.0**93)  # the score, in log2 units, of the keys whose huge bias absorbs their scores; see padded_bias
INTERPRETED = plgpu.InterpretGPUParams(uninitialized_memory="nan")

WGMMA = plgpu.Layout.WGMMA
BY_ROW = WGMMA.reduce(1)
BY_COLUMN = WGMMA.reduce(0)


@dataclass(frozen=True)
class HopperKernel:
    """A kernel for one attention call; the fields are everything it is compiled for.

    q, k and v, and their gradients, are stored as (B, N or M, all_heads, D) with their H heads starting at first_heads:
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
    schedule: Schedule | None  # None: the kernel has only one
    interpret: bool = False
    multiprocessors: int = MULTIPROCESSORS
    # How many chunks queries and keys have in a call with ids, which the kernels then also take; see token_ids.py.
    chunks: tuple[int, int] | None = None
    # Images and heads of the bias, each 1 if broadcast. The kernels take the bias before the ids; see bias.py.
    bias_shape: tuple[int, int] | None = None
    bias_dtype: str = "float32"

    @property
    def has_ids(self) -> bool:
        return self.chunks is not None

    @property
    def padded_queries(self) -> int:
        """Return the row length of log-sum-exp and delta."""
        return padded(self.queries) if self.chunks is None else ROWS * self.chunks[0]

    @property
    def copies(self) -> int:
        """Return the number of copies that load a row, one per part."""
        return len(widths(self.head_dim))

    def zeros(self) -> tuple[jax.Array, ...]:
        """Return zeroed accumulators for ROWS rows of a head, one per part."""
        return tuple(filled((ROWS, width), 0, WGMMA) for width in widths(self.head_dim))

    def rows(self, tokens: int, heads: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, tokens, heads, self.head_dim), jnp.dtype(self.dtype))

    def vector(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.batch, self.heads, self.padded_queries), jnp.float32)

    def id_arrays(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return what `token_ids` returns; nothing without ids."""
        if self.chunks is None:
            return ()
        shapes = (
            *((self.batch, ROWS * n) for n in self.chunks),
            *((self.batch, n, FIELDS) for n in self.chunks),
            (COUNTS,),
        )
        return tuple(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes)

    def bias_array(self, rows: int, columns: int) -> jax.ShapeDtypeStruct:
        assert self.bias_shape is not None
        shape = stored_bias_shape(self.bias_shape, rows, columns)
        return jax.ShapeDtypeStruct(shape, jnp.dtype(self.bias_dtype))

    @property
    def log2_scale(self) -> float:
        """Return the factor of q k in exponents of 2: not 0, so that infinite products keep weights of 0."""
        return (self.scale or 2.0**-100) * LOG2E

    def opaque(self, index):
        """Return an index that the compiler does not know, so that addresses are computed anew and not kept."""
        return index if self.interpret else lax.optimization_barrier(jnp.int32(index))

    @property
    def can_start_from_lse(self) -> bool:
        """Return whether products of scores can start from -lse in units of q k: not if that could overflow."""
        return abs(self.log2_scale) >= 2.0**-100

    @property
    def lowest_product(self) -> float:
        """Return a q k whose weight is 0."""
        return -math.inf if self.scale >= 0 else math.inf

    @property
    def low(self) -> float:
        return lowest_score(self.scale)

    def bias_at(self, bias_ref, image, head, first_row, first_column, columns: int):
        """Return the groups of ROWS × columns of a head's bias, in units of q k.

        A product of scores starts from these values, so that the bias takes no registers beside the scores.
        """
        assert self.bias_shape is not None
        image, head = (x if n > 1 else 0 for x, n in zip((image, head), self.bias_shape, strict=True))
        return groups.at(bias_ref, (image, head), first_row, first_column, columns)

    @property
    def bias_bytes(self) -> int:
        """Return the bytes of a score's bias."""
        return jnp.dtype(self.bias_dtype).itemsize

    def bias_tiles(self, *leading: int, columns: int) -> plgpu.SMEM:
        """Return scratch for tiles of ROWS × columns of the bias."""
        shape = *leading, columns // groups.COLUMNS, ROWS * groups.COLUMNS
        return plgpu.SMEM(shape, jnp.dtype(self.bias_dtype))

    def exponents(self, scores: jax.Array) -> jax.Array:
        """Return scores in log2 units from q k + bias; 0 for keys whose huge bias absorbs their scores."""
        if self.bias_shape is not None:
            scores = jnp.where(scores <= self.low / 2, scores - self.low, scores)
        return scores * self.log2_scale

    def extras(self, refs) -> tuple:
        """Split a kernel's arguments after q, k and v or the vectors: the bias or None, the ids, and the results."""
        bias, rest = (None, refs) if self.bias_shape is None else (refs[0], refs[1:])
        return (bias, rest[:5], rest[5:]) if self.has_ids else (bias, (), rest)

    def launch(self, body, grid: dict[str, int], warpgroups: int, out_type: tuple, scratch: dict):
        return plgpu.kernel(
            body,
            out_type=out_type,
            scratch_types=scratch,
            grid=tuple(grid.values()),
            grid_names=tuple(grid),
            num_threads=warpgroups,
            thread_name="warpgroup",
            # Lane semantics let a kernel choose a tile's memory layout (see untiled). No reduction crosses warps.
            compiler_params=plgpu.CompilerParams(
                approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
            ),
            interpret=INTERPRETED if self.interpret else None,
        )


def has_packed_segments(queries: int, chunks: tuple[int, int] | None) -> bool:
    """Return whether chunks start where segments start: there are then more of them than the rows need."""
    return chunks is not None and chunks[0] * ROWS > padded(queries)


def padded(tokens: int) -> int:
    """Round up to 64 rows per warpgroup in every schedule: copies of vectors are not bounds-checked.

    tokens may be a symbolic number of torch.compile, which JAX's cdiv does not accept.
    """
    return max(-(-tokens // rows) * rows for rows in (192, 256))


def lowest_score(scale: float) -> float:
    """Return LOW in units of q k: the nearest power of two, whose product with the scale is exact in float32.

    Otherwise the forward kernel's fused x * scale - highest would be the rounding error of highest, which is huge here.
    """
    return -(2.0 ** round(math.log2(LOW / (-scale * LOG2E))))


def stored_bias_shape(shape: tuple[int, int], rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of a bias as the kernels read it, for images and heads `shape`; see groups.py."""
    return *shape, padded(rows) // ROWS, padded(columns) // groups.COLUMNS, ROWS * groups.COLUMNS


def tile(rows: int, head_dim: int, dtype, *leading: int) -> tuple:
    """Return scratch for `rows` rows of a head; a tuple with one part per width."""
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


def untiled(part, index, interpret: bool, first: int = 0, rows: int | None = None):
    """Return rows of `part.at[index]` as consecutive rows of one swizzle's width, the TMA unit's view.

    The memory is the same, because the (8, width) tiles are stored in that order. Mosaic GPU copies into tiles of 8
    rows only from arrays of 8 n rows, but images have 197 or 577 tokens. With plain rows, the TMA unit fills rows
    beyond the last token with zeros on load and skips them on store.

    first, rows: the first row and how many, multiples of 8; None: all.
    """
    if interpret:  # the interpreter has no tiled layouts
        return part.at[index] if rows is None else part.at[index, pl.ds(first, rows)]
    tiled = part.ref
    height, width = tiled.shape[-2:]
    some = slice(None)
    if rows is None:
        rows = tiled.shape[-4] * height
    else:
        some = pl.ds(first // height, rows // height)
    indexer = indexing.NDIndexer.from_indices_shape((index, some, *[slice(None)] * 3), tiled.shape)
    return TransformedRef(tiled, (indexer, ReshapeTransform((rows, width)), UnswizzleRef(2 * width)))


def _columns(array_ref, where: tuple, first_row, rows: int, head, part_widths: list[int]):
    """Yield slices of the columns of `array_ref` (B, N, heads, D), of these widths."""
    first_column = 0
    for width in part_widths:
        columns = pl.ds(unchecked(first_column), width)
        yield array_ref.at[where, pl.ds(unchecked(first_row), rows), head, columns]
        first_column += width


def unchecked(start):
    """Hide a start from JAX's bounds check; the TMA unit handles rows beyond the array."""
    return start + 0 * lax.axis_index("warpgroup")


def load_rows(
    array_ref, batch, first_row, head, parts: tuple, index, barrier, interpret: bool, chunk: int | None = None
) -> None:
    """Start copying rows of one head into `parts[index]`; the barrier gets one arrival per group of columns.

    parts: one per group of columns; or one with the groups below each other (see async_product.py).
    chunk: copy only 64 rows, into those with this number.
    """
    per_part = len(widths(array_ref.shape[-1])) // len(parts)  # groups of columns
    height = parts[0].shape[-2] // per_part
    first, rows = (0, height) if chunk is None else (chunk * ROWS, ROWS)
    places = [(part, first + group * height) for part in parts for group in range(per_part)]
    slices = _columns(array_ref, batch, first_row, rows, head, [part.shape[-1] for part, _ in places])
    for (part, place), source in zip(places, slices, strict=True):
        some = () if rows == part.shape[-2] else (place, rows)
        plgpu.copy_gmem_to_smem(source, untiled(part, index, interpret, *some), barrier)


def prefetch_rows(array_ref, batch, first_row, head, interpret: bool) -> None:
    """Have 64 rows of one head fetched to the L2 cache."""
    if not interpret:  # the interpreter has no caches
        plgpu.async_prefetch(array_ref.at[batch, pl.ds(unchecked(first_row), ROWS), head])


def store_rows(parts: tuple, index, array_ref, batch, first_row, head, interpret: bool) -> None:
    """Start copying `parts[index]` out; call commit_smem before and wait_smem_to_gmem after."""
    rows = parts[0].shape[-2]
    slices = _columns(array_ref, batch, first_row, rows, head, [part.shape[-1] for part in parts])
    for part, destination in zip(parts, slices, strict=True):
        plgpu.copy_smem_to_gmem(untiled(part, index, interpret), destination)


def fence_shared_memory(interpret: bool) -> None:
    """Order this thread's accesses to shared memory before later ones by products and the TMA unit.

    An arrival or a barrier must follow, since other threads' accesses are not ordered.
    """
    if interpret:  # the interpreter does not run Mosaic GPU code, and knows only the fence that is also a barrier
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_ctx):
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    fence()


def release_after_reads(barrier, interpret: bool) -> None:
    """Release a slot of the ring that was also read into registers, and not only by products.

    An arrival does not wait for such reads, so the copy engine's next write could overtake them. The fence waits.
    """
    fence_shared_memory(interpret)
    plgpu.barrier_arrive(barrier)


def first_rows(parts: tuple, rows: int) -> tuple:
    return tuple(part if rows == part.shape[0] else part.at[pl.ds(0, rows)] for part in parts)


def padded_columns(tokens: int) -> int:
    """Return the fewest columns of a product that hold the tokens, so that the last tile costs only its contents."""
    return pl.cdiv(tokens, 8) * 8


def widened(x: jax.Array, multiple: int = ROWS) -> jax.Array:
    """Pad with zero columns to a multiple: by default 64, the least that Pallas's products contract over."""
    rows, columns = x.shape
    missing = -columns % multiple
    return jnp.concatenate([x, filled((rows, missing), 0, WGMMA, x.dtype)], axis=1) if missing else x


def filled(shape: tuple[int, ...], value: float, layout, dtype=jnp.float32) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, dtype), layout)


def along_rows(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [0])


def along_columns(x: jax.Array, shape) -> jax.Array:
    return lax.broadcast_in_dim(x, shape, [1])


def same_id(of_row: jax.Array, of_column: jax.Array) -> jax.Array:
    """Return where a row's id equals a column's."""
    shape = (of_row.shape[0], of_column.shape[0])
    return along_rows(of_row, shape) == along_columns(of_column, shape)


def row_sums(x_part, y_part) -> jax.Array:
    """Return rowsum(x y) in float32 of two tiles in shared memory."""
    x, y = (plgpu.load(part, layout=WGMMA).astype(jnp.float32) for part in (x_part, y_part))
    return (x * y).sum(axis=1)


def row_numbers() -> jax.Array:
    """Return each row's number, 0 to 63."""
    return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=BY_ROW)


def position(shape, axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=WGMMA)


def products(*terms: tuple[jax.Array | None, tuple, tuple], interpret: bool) -> tuple[jax.Array, ...]:
    """Return start + a bᵀ over the head dim, in float32, for each (start, a, b); all run concurrently.

    start: in registers; None for zeros. a, b: tiles in shared memory.
    """
    starts, *_ = zip(*terms, strict=True)
    factors = [
        (i, a, transposed(b))
        for i, (_, a_parts, b_parts) in enumerate(terms)
        for a, b in zip(a_parts, b_parts, strict=True)
    ]
    shapes = [(a[0].shape[0], b[0].shape[0]) for _, a, b in terms]
    if any(start is not None for start in starts):
        starts = [filled(shape, 0, WGMMA) if x is None else x for x, shape in zip(starts, shapes, strict=True)]
        return accumulated(tuple(starts), factors, interpret)

    def multiply(*acc_refs):
        for i, a, b in factors:
            plgpu.wgmma(acc_refs[i], a, b)
        return tuple(acc_ref[...] for acc_ref in acc_refs)

    return pl.run_scoped(multiply, *(plgpu.ACC(shape, jnp.float32) for shape in shapes))


def accumulated(sums: tuple, products: list[tuple], interpret: bool, meanwhile=lambda: None) -> tuple:
    """Return `sums` in float32 with sums[i] += a b for each (i, a, b) of `products`; all run concurrently.

    a is an array in registers or a tile in shared memory, b a tile in shared memory. The function `meanwhile` is called
    once the products have started; it must write neither a nor b.
    """
    sums = tuple(x.astype(jnp.float32) for x in sums)
    if interpret:  # the interpreter does not support register operands
        sums = list(sums)
        for i, a, b in products:
            sums[i] += jnp.dot(_value(a), b[...], preferred_element_type=jnp.float32)
        meanwhile()
        return tuple(sums)

    def multiply(acc_refs):
        for i, a, b in products:
            plgpu.wgmma(acc_refs[i], a, b)
        meanwhile()

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(x) for x in sums))


def _value(x):
    return x if isinstance(x, jax.Array) else x[...]
