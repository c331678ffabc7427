"""What the flash kernels for TPU share: the problem's description, heads on lanes, and what is added to scores.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D.
Token-major arrays (B, N, E) keep a head's D values side by side on the lanes, as the projection writes them.
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
# A row without any key has only -inf: subtracting this instead of its maximum gives exp(-inf) = 0, not NaN. Scores
# come nowhere near it, and float32 holds it.
FLOOR = -1e30
VMEM_LIMIT = 100 * 2**20  # of 128 MiB on v5e and v6e; the compiler's own default is 16 MiB

f32 = jnp.float32
_reciprocal = getattr(pltpu, "reciprocal", None) or pl.reciprocal  # jax 0.7 has it in the second place only


def round_up(x: int, to: int) -> int:
    return -(-x // to) * to


@dataclass(frozen=True)
class TpuProblem:
    """One attention call's static side."""

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
    chip: str | None = None  # the TPU that the kernels are for, where that is known

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def unit(self) -> float:
        """What the scores are multiplied by besides their scale: bfloat16's are powers of two, and the factor is free.

        float32's are powers of e. The scale is mostly a power of two and rounds nothing; times scale · log2 e each
        score would be rounded at its own size, which is more than its distance from the maximum.
        """
        return 1.0 if self.dtype == "float32" else LOG2E

    def exp(self, s):
        """e to the scores `s`, which are in the problem's unit."""
        return jnp.exp(s) if self.unit == 1.0 else jnp.exp2(s)

    @property
    def may_lose_rows(self) -> bool:
        """Whether a query can be left without any key."""
        return self.bias is not None or self.mask is not None or self.segments


@dataclass(frozen=True)
class LaneWindow:
    """The whole lane tiles [lo, hi) that hold one head, which is lanes [start, stop) of the window."""

    lo: int
    hi: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.hi - self.lo

    @property
    def folds(self) -> bool:
        """Whether it is two whole tiles, which `fold` lays on one another; at an array's end the second may be cut."""
        return self.size == 2 * LANES

    @property
    def folded_size(self) -> int:
        """Lanes of what `fold` returns."""
        return LANES if self.folds else self.size

    @property
    def parts(self) -> tuple[slice, ...]:
        """The head's lanes in what `fold` returns, in their order."""
        if self.folds:
            return slice(self.start, LANES), slice(0, self.stop - LANES)
        return (slice(self.start, self.stop),)


def windows(heads: int, head_dim: int) -> list[LaneWindow]:
    """Where each head lies; a head of up to 128 lanes touches one tile or two, and shares them with its neighbours."""
    found = []
    for first in range(0, heads * head_dim, head_dim):
        lo = first // LANES * LANES
        hi = min(round_up(first + head_dim, LANES), heads * head_dim)
        found.append(LaneWindow(lo, hi, first - lo, first - lo + head_dim))
    return found


def group_of_heads(problem: TpuProblem) -> int:
    """The fewest heads that fill whole lane tiles (64 lanes: 2, 72: 16); all heads when that does not divide them."""
    fewest = math.lcm(problem.head_dim, LANES) // problem.head_dim
    return fewest if problem.heads % fewest == 0 else problem.heads


def dot(a, b, contract: tuple[int, int]):
    """A product with float32 sums; of float32 inputs an honest one, not the MXU's single bfloat16 pass.

    Of float32 inputs 128 terms at a time are summed, as in v5e's MXU, then their sums: a CPU may add a thousand one
    by one, and those roundings would be most of the error.
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
    """A window's two tiles as one, each of the head's values in its own lane still.

    A head of up to 128 lanes ends in its second tile before the lane where it began in the first, so the two parts do
    not meet. A product then takes the MXU one tile's passes and not two's, and nothing is shifted across lanes.
    """
    if not window.folds:
        return x
    return _choose(_lane(LANES) >= window.start, x[:, :LANES], x[:, LANES:])


def only_head(x, window: LaneWindow):
    """A folded x with zeros in the lanes of other heads, so that a product over all of them is the head's."""
    if window.start == 0 and window.stop == window.size:
        return x
    lane = _lane(x.shape[1])
    inside = reduce(operator.or_, [(lane >= part.start) & (lane < part.stop) for part in window.parts])
    return _choose(inside, x, jnp.zeros_like(x))


def _choose(condition, x, y):
    """`where` by lanes. 16-bit values in pairs of rows: v5e would widen each to 32 bits and narrow what it chose."""
    if x.dtype.itemsize == 4:
        return jnp.where(condition, x, y)
    pairs = [pltpu.bitcast(array, jnp.int32) for array in (x, y)]
    return pltpu.bitcast(jnp.where(condition, *pairs), x.dtype)


def _lane(size: int):
    return lax.broadcasted_iota(jnp.int32, (1, size), 1)


def clear_tail(x, valid: int):
    """x with zeros in the rows from `valid` on: a block's rows past the array's end hold anything, NaN included."""
    return _on_tail(x, 0, valid, 0)


def mask_keys(s, axis: int, valid: int):
    """Scores with -inf at the keys from `valid` on."""
    return _on_tail(s, axis, valid, -jnp.inf)


def clear_rows(x, valid):
    """`clear_tail` for an end that only the running kernel knows."""
    return jnp.where(lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0) < valid, x, jnp.zeros_like(x))


def _on_tail(x, axis: int, valid: int, fill: float):
    """Replace from `valid` on along an axis, touching no more than the tiles that hold the end."""
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
    """The refs of what joins the scores. In the transposed form (keys by queries) their last two axes are swapped.

    bias and mask are (1, heads or 1, rows or 1, columns or 1); the mask is 0 where it keeps and -inf elsewhere.
    row_ids is (1, rows, 1), column_ids (1, 1, columns).
    """

    bias: object = None
    mask: object = None
    row_ids: object = None
    column_ids: object = None

    def join(self, s, problem: TpuProblem, head, rows: slice, columns: slice, transposed: bool, origin=(0, 0)):
        """Scores in the problem's unit: scale, bias, mask, segments, causality.

        `s` is the part at these rows and columns of the refs' blocks; `origin` is where the blocks themselves begin.
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
    """The arrays behind ScoreExtras, in its order, swapped for the transposed form; None where there is none."""
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


def turned(x, window: LaneWindow):
    """The head's rows of a folded x's transpose, (D, tokens).

    16-bit rows come in pairs of 8, so other offsets turn over in float32.
    """
    if window.start % ROWS == 0 and window.stop % ROWS == 0:
        return _head_rows(x.T, window)
    return _head_rows(x.astype(f32).T, window).astype(x.dtype)


def _head_rows(x, window: LaneWindow):
    rows = [x[part] for part in window.parts]
    return jnp.concatenate(rows, axis=0) if len(rows) > 1 else rows[0]


def pipelined(items, first, second) -> None:
    """first(item) of the next item is issued before second(item, ...) of this one.

    The compiler does not move a product across the softmax before it; written in this order, the MXU and the vector
    units work at the same time.
    """
    waiting = None
    for item in items:
        issued = first(item)
        if waiting is not None:
            second(*waiting)
        waiting = (item, issued)
    second(*waiting)


def reciprocal(total, problem: TpuProblem):
    """1 / Σ of a query's exponentials, 0 for a query without keys.

    The sums lie between 1 and the number of keys. A division also heeds zeros, infinities and denormals, at three times
    the operations, on a whole register for each 8 sums; what is left here of v5e's division is its one Newton step.
    Interpreted the estimate is of 8 bits, which that step makes 16: enough for bfloat16, not for float32.
    """
    if problem.dtype == "float32":
        r = 1 / total
    else:
        r = _reciprocal(total, approx=True)
        r = r * (2 - total * r)
    return jnp.where(total > 0, r, 0.0) if problem.may_lose_rows else r


def lanes(first, size: int):
    """Lanes [first, first + size) of a ref; a first lane that only the kernel knows is a multiple of a tile."""
    return pl.ds(first if isinstance(first, int) else pl.multiple_of(first, LANES), size)


class LaneTiles:
    """Puts heads that share lane tiles together: takes each head's window in order, stores each tile when complete."""

    def __init__(self, store):
        self._store = store  # (first lane, value)
        self._open: dict[int, jax.Array] = {}

    def add(self, x, window: LaneWindow, is_last: bool) -> None:
        """x: (rows, lanes) of a folded window, of which the head's own count."""
        for lo in range(window.lo, window.hi, LANES):
            hi = min(lo + LANES, window.hi)
            tile = x if window.folds else x[:, lo - window.lo : hi - window.lo]
            if lo in self._open:
                tile = jnp.where(_lane(hi - lo) >= window.lo + window.start - lo, tile, self._open[lo])
            self._open[lo] = tile
            if is_last or window.lo + window.stop >= hi:
                self._store(lo, self._open.pop(lo))


class RowTiles:
    """The same for transposed results (head dim, tokens): stacks heads on the rows, stores 128 of them turned over."""

    def __init__(self, store):
        self._store = store  # (first lane, value of (tokens, lanes))
        self._rows: list[jax.Array] = []
        self._lane = 0

    def add(self, x_DN, is_last: bool) -> None:
        self._rows.append(x_DN)
        while (waiting := sum(x.shape[0] for x in self._rows)) >= LANES or (is_last and waiting):
            size = min(LANES, waiting)
            *whole, x_DN = self._rows  # only the newest head can reach over the tile's end
            cut = size - sum(x.shape[0] for x in whole)
            tile = jnp.concatenate([*whole, x_DN[:cut]], axis=0) if whole else x_DN[:cut]
            self._store(self._lane, tile.T)
            self._lane += size
            self._rows = [x_DN[cut:]] if cut < x_DN.shape[0] else []
