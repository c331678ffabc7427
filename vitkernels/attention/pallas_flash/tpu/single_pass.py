"""Flash attention for TPU if a full row of scores fits in VMEM (up to about 1k tokens): one pass, no rescaling.

A grid step processes one image with all its heads, in the projection's token-major layout. Heads are unrolled and
software-pipelined in the source: the next head's q kᵀ is issued before the current softmax, because the compiler does
not move a product across it. Two heads of 64 lanes share a register's 128; a product over both with the other's lanes
zeroed costs no extra MXU time and avoids lane shifts. A head that straddles two registers (72, 80, 88 lanes) is folded
into one.

A single backward kernel recomputes the scores transposed (keys by queries), so that sums over keys reduce along
sublanes, not lanes. It computes delta = Σ p dp itself and needs no saved statistics from the forward pass.

Shape suffixes: as in tiles.py.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.attention.pallas_flash.tpu.block_plans import PassBlocks
from vitkernels.attention.pallas_flash.tpu.tiles import (
    FLOOR,
    LANES,
    ROWS,
    VMEM_LIMIT,
    LaneTiles,
    RowTiles,
    ScoreExtras,
    TpuProblem,
    clear_tail,
    dot,
    extra_arrays,
    f32,
    fold,
    lanes,
    mask_keys,
    only_head,
    reciprocal,
    round_up,
    transposed_head,
    windows,
)
from vitkernels.bridge.pallas_schedule import pipelined


@dataclass(frozen=True)
class QkvLayout:
    """The layout of q, k and v: one packed array of 3 * E lanes, or three of E."""

    problem: TpuProblem
    packed: bool

    @property
    def q_rows(self) -> int:
        p = self.problem
        return round_up(max(p.q_tokens, p.kv_tokens) if self.packed else p.q_tokens, LANES)

    @property
    def kv_rows(self) -> int:
        return round_up(self.problem.kv_tokens, LANES)

    def specs(self) -> list[pl.BlockSpec]:
        E = self.problem.width
        if self.packed:
            return [pl.BlockSpec((1, self.q_rows, 3 * E), lambda b: (b, 0, 0))]
        return [pl.BlockSpec((1, rows, E), lambda b: (b, 0, 0)) for rows in (self.q_rows, self.kv_rows, self.kv_rows)]

    def shapes(self, dtype) -> list[jax.ShapeDtypeStruct]:
        p = self.problem
        if self.packed:
            return [jax.ShapeDtypeStruct((p.batch, p.q_tokens, 3 * p.width), dtype)]
        tokens = (p.q_tokens, p.kv_tokens, p.kv_tokens)
        return [jax.ShapeDtypeStruct((p.batch, t, p.width), dtype) for t in tokens]

    def operands(self, refs) -> list[tuple[object, int]]:
        """Return (ref, first lane) of q, k and v."""
        E = self.problem.width
        return [(refs[0], 0), (refs[0], E), (refs[0], 2 * E)] if self.packed else [(ref, 0) for ref in refs]


def q_blocks(rows: int, largest: int, multiple: int) -> list[slice]:
    """Split `rows` into equal blocks of at most `largest` rows; all but the last are multiples of `multiple`."""
    count = -(-rows // largest)
    size = round_up(-(-rows // count), multiple)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _for_groups(problem: TpuProblem, per_trip: int, body) -> None:
    """Run body(first head, first lane, heads) over all heads: unrolled, or in a loop over groups of full tiles."""
    if per_trip == problem.heads:
        body(0, 0, per_trip)
        return

    def trip(i, carry):
        body(i * per_trip, i * (per_trip * problem.head_dim), per_trip)
        return carry

    lax.fori_loop(0, problem.heads // per_trip, trip, 0)


# ---------------------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------------------


def _forward_kernel(*refs, layout: QkvLayout, sizes: PassBlocks, present: tuple[bool, ...]):
    problem = layout.problem
    *inputs, o_ref = refs
    n = len(layout.specs())
    operands = layout.operands(inputs[:n])
    extras = ScoreExtras.of(inputs[n:], present)
    blocks = q_blocks(round_up(problem.q_tokens, ROWS), sizes.queries, ROWS)
    keys = slice(0, layout.kv_rows)

    def heads_at(first_head, first_lane, heads):
        head_windows = windows(heads, problem.head_dim)

        def take(operand, window, rows):
            ref, base = operands[operand]
            return fold(ref[0, rows, lanes(base + first_lane + window.lo, window.size)], window)

        def scores(item):
            h, rows = item
            q = only_head(take(0, head_windows[h], rows), head_windows[h])
            return dot(q, take(1, head_windows[h], keys), (1, 1))

        def store(rows, lane, value):
            o_ref[0, rows, lanes(first_lane + lane, value.shape[1])] = value.astype(o_ref.dtype)

        tiles = {rows.start: LaneTiles(partial(store, rows)) for rows in blocks}

        def finish(item, s):
            h, rows = item
            s = extras.join(s, problem, first_head + h, rows, keys, transposed=False)
            s = mask_keys(s, 1, problem.kv_tokens)
            top = jnp.max(s, axis=1, keepdims=True)
            if problem.may_lose_rows:
                top = jnp.maximum(top, FLOOR)
            p = problem.exp(s - top)
            total = jnp.sum(p, axis=1, keepdims=True)
            v = clear_tail(take(2, head_windows[h], keys), problem.kv_tokens)
            o = dot(p.astype(v.dtype), v, (1, 0)) * reciprocal(total, problem)
            tiles[rows.start].add(o, head_windows[h], is_last=h == heads - 1)

        pipelined([(h, rows) for h in range(heads) for rows in blocks], scores, finish)

    _for_groups(problem, sizes.heads, heads_at)


def _extra_specs(arrays, rows: int, columns: int) -> list[pl.BlockSpec]:
    """Return the specs of the extras that are present: one image (or the shared one), all heads, rows and columns."""
    specs = []
    for array, sizes in zip(arrays, ((rows, columns), (rows, columns), (rows, 1), (1, columns)), strict=True):
        if array is None:
            continue
        block = [1, *array.shape[1:-2]]
        block += [size if length > 1 else 1 for length, size in zip(array.shape[-2:], sizes, strict=True)]
        shared = array.shape[0] == 1
        specs.append(pl.BlockSpec(tuple(block), _first_axis(shared, len(block))))
    return specs


def _first_axis(shared: bool, ndim: int):
    return lambda b: (0 if shared else b, *[0] * (ndim - 1))


def forward(problem: TpuProblem, sizes: PassBlocks, arrays: tuple, bias, mask, ids):
    """Map qkv (B, N, 3E), or q (B, N, E), k and v (B, M, E), to the output (B, N, E)."""
    layout = QkvLayout(problem, packed=len(arrays) == 1)
    q_rows = round_up(problem.q_tokens, ROWS)
    extras = extra_arrays(bias, mask, ids, transposed=False)
    return pl.pallas_call(
        partial(_forward_kernel, layout=layout, sizes=sizes, present=tuple(x is not None for x in extras)),
        grid=(problem.batch,),
        in_specs=[*layout.specs(), *_extra_specs(extras, q_rows, layout.kv_rows)],
        out_specs=pl.BlockSpec((1, q_rows, problem.width), lambda b: (b, 0, 0)),
        out_shape=jax.ShapeDtypeStruct((problem.batch, problem.q_tokens, problem.width), arrays[0].dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",), vmem_limit_bytes=VMEM_LIMIT),
        name="flash_single_pass_forward",
    )(*arrays, *[x for x in extras if x is not None])


# ---------------------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------------------


def _backward_refs(refs, layout: QkvLayout, present: tuple[bool, ...], bias_gradient: bool) -> tuple:
    """Return the operands q, k, v, the ref of do, the extras, the operands dq, dk, dv, and the ref of dbias or None."""
    n = len(layout.specs())
    inputs, do_ref, rest = refs[:n], refs[n], refs[n + 1 :]
    extras, outputs = ScoreExtras.of(rest[: sum(present)], present), rest[sum(present) :]
    dbias_ref = outputs[n] if bias_gradient else None
    return layout.operands(inputs), do_ref, extras, layout.operands(outputs[:n]), dbias_ref


def _backward_kernel(*refs, layout: QkvLayout, sizes: PassBlocks, present: tuple[bool, ...], bias_gradient: bool):
    problem = layout.problem
    operands, do_ref, extras, gradients, dbias_ref = _backward_refs(refs, layout, present, bias_gradient)
    blocks = q_blocks(round_up(problem.q_tokens, LANES), sizes.queries, LANES)
    keys = slice(0, layout.kv_rows)
    N, M = problem.q_tokens, problem.kv_tokens
    if dbias_ref is not None:
        _clear_at_first(dbias_ref, problem)

    def heads_at(first_head, first_lane, heads):
        head_windows = windows(heads, problem.head_dim)

        def take(operand, window, rows):
            ref, base = operands[operand]
            x = ref[0, rows, lanes(base + first_lane + window.lo, window.size)]
            return clear_tail(fold(x, window), (N if operand == 0 else M) - rows.start)

        def take_do(window, rows):
            do = do_ref[0, rows, lanes(first_lane + window.lo, window.size)]
            return clear_tail(fold(do, window), N - rows.start)

        def store(operand, rows, lane, value):
            ref, base = gradients[operand]
            ref[0, rows, lanes(base + first_lane + lane, value.shape[1])] = value.astype(ref.dtype)

        dq_tiles = {rows.start: RowTiles(partial(store, 0, rows)) for rows in blocks}
        dk_tiles, dv_tiles = (LaneTiles(partial(store, operand, keys)) for operand in (1, 2))
        sums = {}

        def products(item):
            h, rows = item
            w = head_windows[h]
            s = dot(only_head(take(1, w, keys), w), take(0, w, rows), (1, 1))
            dp = dot(only_head(take(2, w, keys), w), take_do(w, rows), (1, 1))
            return s, dp

        def finish(item, issued):
            h, rows = item
            w, is_last = head_windows[h], h == heads - 1
            p, ds = _softmax_and_its_gradient(*issued, problem, extras, first_head + h, rows, keys)
            if dbias_ref is not None:
                _add_bias_gradient(dbias_ref, ds, first_head + h, rows)
            q, do = take(0, w, rows), take_do(w, rows)
            p, ds = p.astype(q.dtype), ds.astype(q.dtype)
            dv, dk = dot(p, do, (1, 0)), dot(ds, q, (1, 0)) * problem.scale
            if h in sums:
                dv, dk = sums[h][0] + dv, sums[h][1] + dk
            sums[h] = dv, dk
            if rows is blocks[-1]:
                dv_tiles.add(dv, w, is_last)
                dk_tiles.add(dk, w, is_last)
            dq_DN = dot(transposed_head(take(1, w, keys), w), ds, (1, 0)) * problem.scale
            dq_tiles[rows.start].add(dq_DN, is_last)

        pipelined([(h, rows) for h in range(heads) for rows in blocks], products, finish)

    _for_groups(problem, sizes.heads, heads_at)


def _softmax_and_its_gradient(s, dp, problem, extras, head, rows, keys):
    """Return the probabilities and the scores' gradient, both (keys, queries)."""
    s = extras.join(s, problem, head, keys, rows, transposed=True)
    s = mask_keys(s, 0, problem.kv_tokens)
    top = jnp.max(s, axis=0, keepdims=True)
    if problem.may_lose_rows:
        top = jnp.maximum(top, FLOOR)
    p = problem.exp(s - top)
    p = p * reciprocal(jnp.sum(p, axis=0, keepdims=True), problem)
    if problem.may_lose_rows and rows.stop > problem.q_tokens:
        # Extras beyond the last query are arbitrary. q and do are zero there, so zeroing p suffices.
        column = lax.broadcasted_iota(jnp.int32, (1, p.shape[1]), 1)
        p = jnp.where(column < problem.q_tokens - rows.start, p, 0.0)
    delta = jnp.sum(p * dp, axis=0, keepdims=True)
    return p, p * (dp - delta)


def _clear_at_first(dbias_ref, problem: TpuProblem) -> None:
    """Zero the gradient: once if all images share the bias, else at every image."""
    first = pl.program_id(0) == 0 if problem.bias[0] == 1 else True

    @pl.when(first)
    def _():
        dbias_ref[...] = jnp.zeros_like(dbias_ref)


def _add_bias_gradient(dbias_ref, ds_MN, head, rows: slice) -> None:
    """Add the scores' gradient, summed over the axes that the bias is broadcast on."""
    _, heads, m, n = dbias_ref.shape
    if m == 1:
        ds_MN = jnp.sum(ds_MN, axis=0, keepdims=True)
    if n == 1:
        ds_MN = jnp.sum(ds_MN, axis=1, keepdims=True)
    at = (0, head if heads > 1 else 0, slice(None), rows if n > 1 else slice(None))
    dbias_ref[at] += ds_MN


def backward(problem: TpuProblem, sizes: PassBlocks, arrays: tuple, do_BNE, bias, mask, ids, bias_gradient: bool):
    """Return gradients shaped like `arrays`, and the bias's gradient in float32 (None unless requested)."""
    layout = QkvLayout(problem, packed=len(arrays) == 1)
    q_rows = round_up(problem.q_tokens, LANES)
    extras = extra_arrays(bias, mask, ids, transposed=True)
    out_specs, out_shapes = layout.specs(), layout.shapes(arrays[0].dtype)
    # Sequential if the gradient of a shared bias sums over images; otherwise a chip's two cores may split them.
    images = "arbitrary" if bias_gradient and problem.bias[0] == 1 else "parallel"
    if bias_gradient:
        b, h, n, m = problem.bias
        block = (1, h, layout.kv_rows if m > 1 else 1, q_rows if n > 1 else 1)
        out_specs.append(pl.BlockSpec(block, _first_axis(b == 1, 4)))
        out_shapes.append(jax.ShapeDtypeStruct((b, h, m, n), f32))
    *gradients, last = pl.pallas_call(
        partial(
            _backward_kernel,
            layout=layout,
            sizes=sizes,
            present=tuple(x is not None for x in extras),
            bias_gradient=bias_gradient,
        ),
        grid=(problem.batch,),
        in_specs=[
            *layout.specs(),
            pl.BlockSpec((1, q_rows, problem.width), lambda b: (b, 0, 0)),
            *_extra_specs(extras, layout.kv_rows, q_rows),
        ],
        out_specs=out_specs,
        out_shape=out_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=(images,), vmem_limit_bytes=VMEM_LIMIT),
        name="flash_single_pass_backward",
    )(*arrays, do_BNE, *[x for x in extras if x is not None])
    if bias_gradient:
        return gradients, jnp.swapaxes(last, -1, -2)
    return [*gradients, last], None
