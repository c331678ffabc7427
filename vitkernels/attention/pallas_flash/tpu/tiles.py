"""Shared parts of the flash kernels for TPU: the problem, the layout of heads on lanes, bias and masks, products.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D.
Token-major arrays (B, N, E) keep a head's D values adjacent on the lanes, as the projection writes them.
"""

import math
import operator
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # of a vector register
ROWS = 16  # bfloat16 rows of a register; float32 has 8
LOG2E = math.log2(math.e)
# A row without keys holds only -inf. Subtracting this floor instead of the maximum gives exp(-inf) = 0, not NaN. It is
# the lowest finite score, which padding masks add.
FLOOR = float(jnp.finfo(jnp.float32).min)
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB

f32 = jnp.float32
_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal  # jax 0.7 has only pl.reciprocal


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class TpuProblem:
    """The static description of one attention call."""

    batch: int
    heads: int
    head_dim: int
    q_tokens: int
    kv_tokens: int
    scale: float
    is_causal: bool
    dtype: str
    bias: tuple[int, int, int, int] | None  # its shape; a dimension of 1 is broadcast
    mask: tuple[int, int, int, int] | None
    segments: bool
    chip: str | None = None  # the target TPU, if known

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def unit(self) -> float:
        """Return the factor that multiplies the scores' scale: log2 e for bfloat16, 1 for float32 or a bias.

        In bfloat16 the factor is free. In float32 the scale is usually a power of two and exact, but scale · log2 e
        rounds each score relative to its own size, which exceeds its distance from the maximum. A bias near the end of
        float32's range would overflow.
        """
        return 1.0 if self.dtype == "float32" or self.bias is not None else LOG2E

    def exp(self, s):
        """Return exp of the scores `s`, which are in the problem's unit."""
        return jnp.exp(s) if self.unit == 1.0 else jnp.exp2(s)

    @property
    def may_lose_rows(self) -> bool:
        """Return whether a query can be left without keys."""
        return self.bias is not None or self.mask is not None or self.segments


@dataclass(frozen=True)
class LaneWindow:
    """The full lane tiles [lo, hi) that contain one head, at lanes [start, stop) of the window."""

    lo: int
    hi: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def folds(self) -> bool:
        """Return whether the window is two full tiles, which `fold` merges; an array's last tile may be partial."""
        return self.size == 2 * LANES

    @property
    def folded_size(self) -> int:
        """Return the lanes of `fold`'s result."""
        return LANES if self.folds else self.size

    @property
    def parts(self) -> tuple[slice, ...]:
        """Return the head's lanes in `fold`'s result, in order."""
        if self.folds:
            return slice(self.start, LANES), slice(0, self.stop - LANES)
        return (slice(self.start, self.stop),)


def windows(heads: int, head_dim: int) -> list[LaneWindow]:
    """Return each head's window. A head of up to 128 lanes spans one or two tiles, shared with its neighbors."""
    found = []
    for first in range(0, heads * head_dim, head_dim):
        lo = first // LANES * LANES
        hi = min(round_up(first + head_dim, LANES), heads * head_dim)
        found.append(LaneWindow(lo, hi, first - lo, first - lo + head_dim))
    return found


def group_of_heads(problem: TpuProblem) -> int:
    """Return the fewest heads that fill full lane tiles (64 lanes: 2, 72: 16); all heads if it does not divide them."""
    fewest = math.lcm(problem.head_dim, LANES) // problem.head_dim
    return fewest if problem.heads % fewest == 0 else problem.heads


def dot(a, b, contract: tuple[int, int]):
    """Return a product accumulated in float32; float32 inputs in full precision, not in one bfloat16 MXU pass.

    Float32 products sum 128 terms at a time, as v5e's MXU does, then the partial sums. A CPU may add a thousand terms
    sequentially, whose rounding would dominate the error.
    """
    dims = (((contract[0],), (contract[1],)), ((), ()))
    product = partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=f32)
    if a.dtype != f32:
        return product(a, b)
    terms = a.shape[contract[0]]
    blocks = [(first, min(first + LANES, terms)) for first in range(0, terms, LANES)]
    factors = [
        [lax.slice_in_dim(x, *block, axis=axis) for x, axis in zip((a, b), contract, strict=True)] for block in blocks
    ]
    return reduce(operator.add, [product(*pair, precision=lax.Precision.HIGHEST) for pair in factors])


def fold(x, window: LaneWindow):
    """Merge a window's two tiles into one, keeping each of the head's values in its lane.

    A head of up to 128 lanes ends in its second tile before the lane where it begins in the first, so its parts do not
    overlap. A product then takes the MXU passes of one tile instead of two, without shifts across lanes.
    """
    if not window.folds:
        return x
    return _choose(_lane(LANES) >= window.start, x[:, :LANES], x[:, LANES:])


def only_head(x, window: LaneWindow):
    """Zero the lanes of other heads in a folded x, so that a product over all lanes is this head's."""
    if window.start == 0 and window.stop == window.size:
        return x
    lane = _lane(x.shape[1])
    inside = reduce(operator.or_, [(lane >= part.start) & (lane < part.stop) for part in window.parts])
    return _choose(inside, x, jnp.zeros_like(x))


def _choose(condition, x, y):
    """Select by lane, 16-bit values in pairs of rows: v5e would widen single ones to 32 bits and narrow the result."""
    if x.dtype.itemsize == 4:
        return jnp.where(condition, x, y)
    pairs = [pltpu.bitcast(array, jnp.int32) for array in (x, y)]
    return pltpu.bitcast(jnp.where(condition, *pairs), x.dtype)


def _lane(size: int):
    return lax.broadcasted_iota(jnp.int32, (1, size), 1)


def clear_tail(x, valid: int):
    """Zero the rows from `valid` on: a block's rows beyond the array's end are arbitrary, possibly NaN."""
    return _on_tail(x, 0, valid, 0)


def mask_keys(s, axis: int, valid: int):
    """Set the scores of keys from `valid` on to -inf."""
    return _on_tail(s, axis, valid, -jnp.inf)


def clear_rows(x, valid):
    """Zero the rows from `valid` on, for a `valid` known only at run time."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) < valid, x, jnp.zeros_like(x))


def _on_tail(x, axis: int, valid: int, fill: float):
    """Fill from `valid` on along an axis, touching only the tiles that contain the end."""
    size = x.shape[axis]
    if valid >= size:
        return x
    first = valid // LANES * LANES
    tail = lax.slice_in_dim(x, first, size, axis=axis)
    shape = [1, 1]
    shape[axis] = size - first
    index = lax.broadcasted_iota(jnp.int32, tuple(shape), axis) + first
    tail = jnp.where(index < valid, tail, jnp.full_like(tail, fill))
    if first == 0:
        return tail
    return jnp.concatenate([lax.slice_in_dim(x, 0, first, axis=axis), tail], axis=axis)


@dataclass(frozen=True)
class ScoreExtras:
    """The refs of bias, mask and segments. In the transposed form (keys by queries) their last two axes are swapped.

    bias and mask are (1, heads or 1, rows or 1, columns or 1); the mask is 0 where it keeps and -inf elsewhere.
    row_ids is (1, rows, 1), column_ids (1, 1, columns).
    """

    bias: object = None
    mask: object = None
    row_ids: object = None
    column_ids: object = None

    @classmethod
    def of(cls, refs, present: tuple[bool, ...]) -> "ScoreExtras":
        """Assign refs to the fields that are present, in order."""
        given = iter(refs)
        return cls(*[next(given) if is_present else None for is_present in present])

    def join(self, s, problem: TpuProblem, head, rows: slice, columns: slice, transposed: bool, origin=(0, 0)):
        """Return scores in the problem's unit, with scale, bias, mask, segments and causality applied.

        `s` covers these rows and columns of the refs' blocks; `origin` is the blocks' first row and column.
        """
        s = s * (problem.scale * problem.unit)
        for ref, factor in ((self.bias, problem.unit), (self.mask, None)):
            if ref is not None:
                term = _block(ref, head, rows, columns).astype(f32)
                s = s + (term if factor is None else term * factor)
        if self.row_ids is not None:
            same = self.row_ids[0, rows, :] == self.column_ids[0, :, columns]
            s = jnp.where(same, s, -jnp.inf)
        if problem.is_causal:
            row = lax.broadcasted_iota(jnp.int32, s.shape, 0) + (rows.start + origin[0])
            column = lax.broadcasted_iota(jnp.int32, s.shape, 1) + (columns.start + origin[1])
            s = jnp.where(row <= column if transposed else column <= row, s, -jnp.inf)
        return s


def _block(ref, head, rows: slice, columns: slice):
    _, heads, n, m = ref.shape
    return ref[0, head if heads > 1 else 0, rows if n > 1 else slice(0, 1), columns if m > 1 else slice(0, 1)]


def extra_arrays(bias, mask, ids, transposed: bool) -> list:
    """Return the arrays of ScoreExtras in order, swapped for the transposed form; None for absent ones."""
    swap = partial(jnp.swapaxes, axis1=-1, axis2=-2) if transposed else (lambda x: x)
    if mask is not None:
        mask = jnp.where(mask, 0.0, -jnp.inf).astype(jnp.bfloat16)
    ids = None if ids is None else ids.astype(jnp.int32)
    return [
        None if bias is None else swap(bias),
        None if mask is None else swap(mask),
        None if ids is None else ids[:, :, None],
        None if ids is None else ids[:, None, :],
    ]


def transposed_head(x, window: LaneWindow):
    """Return the head's rows of a folded x's transpose, (D, tokens).

    16-bit rows are packed in groups of 16; other offsets are transposed in float32.
    """
    if window.start % ROWS == 0 and window.stop % ROWS == 0:
        return _head_rows(x.T, window)
    return _head_rows(x.astype(f32).T, window).astype(x.dtype)


def _head_rows(x, window: LaneWindow):
    rows = [x[part] for part in window.parts]
    return jnp.concatenate(rows, axis=0) if len(rows) > 1 else rows[0]


def reciprocal(total, problem: TpuProblem):
    """Return 1 / Σ of a query's exponentials, 0 for a query without keys.

    The sums are between 1 and the number of keys. A division also handles zeros, infinities and denormals, at three
    times the operations, on a full register per 8 sums; this keeps only the Newton step of v5e's division. In the
    interpreter the initial estimate has 8 bits and the step yields 16: enough for bfloat16, not for float32.
    """
    if problem.dtype == "float32":
        r = 1 / total
    else:
        r = _reciprocal(total, approx=True)
        r = r * (2 - total * r)
    return jnp.where(total > 0, r, 0.0) if problem.may_lose_rows else r


def lanes(first, size: int):
    """Return the slice [first, first + size) of lanes; a `first` known only at run time is a multiple of a tile."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), size)


class LaneTiles:
    """Assemble heads that share lane tiles: add each head's window in order; each tile is stored when complete."""

    def __init__(self, store):
        self._store = store  # (first lane, value)
        self._open: dict[int, jax.Array] = {}

    def add(self, x, window: LaneWindow, is_last: bool) -> None:
        """Add x: (rows, lanes) of a folded window, of which only the head's lanes are used."""
        for lo in range(window.lo, window.hi, LANES):
            hi = min(lo + LANES, window.hi)
            tile = x if window.folds else x[:, lo - window.lo : hi - window.lo]
            if lo in self._open:
                tile = jnp.where(_lane(hi - lo) >= window.lo + window.start - lo, tile, self._open[lo])
            self._open[lo] = tile
            if is_last or window.lo + window.stop >= hi:
                self._store(lo, self._open.pop(lo))


class RowTiles:
    """Assemble transposed results (head dim, tokens): stack heads on the rows; store 128 rows at a time, transposed."""

    def __init__(self, store):
        self._store = store  # (first lane, value of (tokens, lanes))
        self._rows: list[jax.Array] = []
        self._lane = 0

    def add(self, x_DN, is_last: bool) -> None:
        self._rows.append(x_DN)
        while (waiting := sum(x.shape[0] for x in self._rows)) >= LANES or (is_last and waiting):
            size = min(LANES, waiting)
            *complete, x_DN = self._rows  # only the newest head can cross the tile's end
            cut = size - sum(x.shape[0] for x in complete)
            tile = jnp.concatenate([*complete, x_DN[:cut]], axis=0) if complete else x_DN[:cut]
            self._store(self._lane, tile.T)
            self._lane += size
            self._rows = [x_DN[cut:]] if cut < x_DN.shape[0] else []
