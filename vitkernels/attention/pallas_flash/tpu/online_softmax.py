"""Flash attention for TPU at any length: the online softmax over blocks of keys, and one fused backward kernel.

A grid step processes one block of queries, one of keys, and the fewest heads that fill full lane tiles. Scores are
transposed (keys by queries) throughout: maxima and sums over keys reduce along sublanes, and a query's running
maximum, sum and output occupy lanes of a row. The backward kernel iterates over keys in the outer loop and queries in
the inner one, keeps dk and dv of its keys and dq of all queries in VMEM, and so computes each score once.

Shape suffixes: as in tiles.py.
Source: Dao, "FlashAttention-2", arXiv 2307.08691.
"""

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
    VMEM_LIMIT,
    LaneTiles,
    RowTiles,
    ScoreExtras,
    TpuProblem,
    clear_rows,
    dot,
    extra_arrays,
    f32,
    fold,
    only_head,
    reciprocal,
    transposed_head,
    windows,
)
from vitkernels.bridge.pallas_schedule import pipelined

_MASKED_LSE = 1e30  # a log-sum-exp that makes every probability of a column 0


class _Grid:
    """The grid, (B, groups of heads, outer, inner), and the blocks of a step at (b, g, i, j).

    i indexes blocks of queries and j blocks of keys; `order` names the grid's axes.
    """

    def __init__(self, problem: TpuProblem, blocks: PassBlocks, packed: bool, order: str):
        self.problem, self.blocks, self.order = problem, blocks, order
        self.groups = problem.heads // self.blocks.heads
        self.width = self.blocks.heads * problem.head_dim
        self.n_queries = pl.cdiv(problem.q_tokens, self.blocks.queries)
        self.n_keys = pl.cdiv(problem.kv_tokens, self.blocks.keys)
        self._packed = packed

    @property
    def sizes(self) -> tuple[int, ...]:
        sizes = {"b": self.problem.batch, "g": self.groups, "i": self.n_queries, "j": self.n_keys}
        return tuple(sizes[axis] for axis in self.order)

    def at(self, place):
        """Return `place(b, g, i, j)` as an index map in the grid's order of axes."""
        return lambda *ids: place(**dict(zip(self.order, ids, strict=True)))

    def program(self) -> dict[str, jax.Array]:
        return {axis: pl.program_id(n) for n, axis in enumerate(self.order)}

    def inputs(self) -> list[pl.BlockSpec]:
        """Return the specs of q, k and v: three arrays, or thirds of the lanes of one."""
        return [self.rows("i", 0), self.rows("j", 1), self.rows("j", 2)]

    def rows(self, axis: str, third: int | None = None) -> pl.BlockSpec:
        """Return the spec of a block of token rows, indexed by `axis`, and of the group's lanes."""
        offset = third * self.groups if self._packed and third is not None else 0
        size = self.blocks.queries if axis == "i" else self.blocks.keys
        return pl.BlockSpec((1, size, self.width), self.at(lambda b, g, i, j: (b, i if axis == "i" else j, offset + g)))

    def statistics(self) -> list[pl.BlockSpec]:
        """Return the specs of the saved statistics and delta: per query, (B, groups, heads of a group, N)."""
        block = (1, 1, self.blocks.heads, self.blocks.queries)
        return [pl.BlockSpec(block, self.at(lambda b, g, i, j: (b, g, 0, i)))] * (self.saved[2] + 1)

    @property
    def saved(self) -> tuple[int, ...]:
        """Return the shape of the saved statistics: in bfloat16 one per query, its log-sum-exp.

        In float32 the log-sum-exp's rounding, 5e-7, would propagate to every probability, and with a bias the maximum
        may be so large that it absorbs log Σ. So the maximum and 1 / Σ are then saved separately.
        """
        problem = self.problem
        return problem.batch, self.groups, 2 if problem.unit == 1.0 else 1, self.blocks.heads, problem.q_tokens

    def extras(self, arrays) -> list[pl.BlockSpec]:
        """Return the specs of the extras that are present, in the transposed form."""
        keys, queries, heads = self.blocks.keys, self.blocks.queries, self.blocks.heads
        specs = []
        for array in arrays[:2]:
            if array is not None:
                full = [n > 1 for n in array.shape]
                block = [1, heads if full[1] else 1, keys if full[2] else 1, queries if full[3] else 1]
                specs.append(pl.BlockSpec(tuple(block), self.at(partial(_masked, full))))
        if arrays[2] is not None:
            specs.append(pl.BlockSpec((1, keys, 1), self.at(lambda b, g, i, j: (b, j, 0))))
            specs.append(pl.BlockSpec((1, 1, queries), self.at(lambda b, g, i, j: (b, 0, i))))
        return specs


def _masked(full, b, g, i, j):
    return tuple(at if spans else 0 for at, spans in zip((b, g, j, i), full, strict=True))


def _scores(grid: _Grid, step, extras: ScoreExtras, head: int, s):
    """Return a head's scores, (keys, queries), in the problem's unit; -inf if masked or beyond the last key."""
    problem, blocks = grid.problem, grid.blocks
    origin = (step["j"] * blocks.keys, step["i"] * blocks.queries)
    keys, queries = slice(0, blocks.keys), slice(0, blocks.queries)
    s = extras.join(s, problem, head, keys, queries, transposed=True, origin=origin)
    if problem.kv_tokens % blocks.keys:
        row = lax.broadcasted_iota(jnp.int32, (blocks.keys, 1), 0)
        s = jnp.where(row < problem.kv_tokens - origin[0], s, -jnp.inf)
    return s


def _inputs(grid: _Grid, step, q_ref, k_ref, v_ref):
    """Return readers of a head's window of q, k and v, with zeros beyond the last token."""
    problem, blocks = grid.problem, grid.blocks

    def reader(ref, tokens, size, axis):
        def read(window):
            x = fold(ref[0, :, window.lo : window.hi], window)
            return clear_rows(x, tokens - step[axis] * size) if tokens % size else x

        return read

    q = reader(q_ref, problem.q_tokens, blocks.queries, "i")
    k, v = (reader(ref, problem.kv_tokens, blocks.keys, "j") for ref in (k_ref, v_ref))
    return q, k, v


def _call(kernel, grid: _Grid, in_specs, out_specs, out_shape, scratch_shapes, name):
    return pl.pallas_call(
        kernel,
        grid=grid.sizes,
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=scratch_shapes,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",) * 4, vmem_limit_bytes=VMEM_LIMIT),
        name=name,
    )


# ---------------------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------------------


def _forward_kernel(*refs, grid: _Grid, present: tuple[bool, ...]):
    problem, blocks = grid.problem, grid.blocks
    step = grid.program()
    *inputs, o_ref, saved_ref, top_ref, sum_ref, o_DN_ref = refs
    extras = ScoreExtras.of(inputs[3:], present)
    read_q, read_k, read_v = _inputs(grid, step, *inputs[:3])
    head_windows = windows(blocks.heads, problem.head_dim)

    @pl.when(step["j"] == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, FLOOR)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        o_DN_ref[...] = jnp.zeros_like(o_DN_ref)

    def product(h):
        return dot(only_head(read_k(head_windows[h]), head_windows[h]), read_q(head_windows[h]), (1, 1))

    def accumulate(h, s):
        s = _scores(grid, step, extras, h, s)
        top = jnp.maximum(top_ref[h], jnp.max(s, axis=0, keepdims=True))
        shrink = problem.exp(top_ref[h] - top)
        p = problem.exp(s - top)
        top_ref[h] = top
        sum_ref[h] = sum_ref[h] * shrink + jnp.sum(p, axis=0, keepdims=True)
        v_DM = transposed_head(read_v(head_windows[h]), head_windows[h])
        o_DN_ref[h] = o_DN_ref[h] * shrink + dot(v_DM, p.astype(v_DM.dtype), (1, 0))

    pipelined(range(blocks.heads), product, accumulate)

    @pl.when(step["j"] == grid.n_keys - 1)
    def _():
        tiles = RowTiles(partial(_store, o_ref))
        for h in range(blocks.heads):
            tiles.add(o_DN_ref[h] * reciprocal(sum_ref[h], problem), h == blocks.heads - 1)
            # A query without keys has zero probabilities for any finite value here.
            total = jnp.where(sum_ref[h] > 0, sum_ref[h], 1.0) if problem.may_lose_rows else sum_ref[h]
            if saved_ref.shape[2] == 2:
                saved_ref[0, 0, 0, h : h + 1, :] = top_ref[h]
                saved_ref[0, 0, 1, h : h + 1, :] = 1 / total
            else:
                saved_ref[0, 0, 0, h : h + 1, :] = top_ref[h] + jnp.log2(total)


def _store(ref, lane, value):
    ref[0, :, lane : lane + value.shape[1]] = value.astype(ref.dtype)


def forward(problem: TpuProblem, sizes: PassBlocks, arrays: tuple, bias, mask, ids):
    """Map qkv (B, N, 3E), or q (B, N, E), k and v (B, M, E), to the output (B, N, E) and its saved statistics.

    The statistics are log2 Σ exp2 of the scores (B, G, 1, H / G, N); in float32 or with a bias their maximum and 1 / Σ
    (B, G, 2, H / G, N).
    """
    grid = _Grid(problem, sizes, len(arrays) == 1, "bgij")
    extras = extra_arrays(bias, mask, ids, transposed=True)
    heads, queries = grid.blocks.heads, grid.blocks.queries
    shape = jax.ShapeDtypeStruct
    return _call(
        partial(_forward_kernel, grid=grid, present=tuple(x is not None for x in extras)),
        grid,
        in_specs=[*grid.inputs(), *grid.extras(extras)],
        out_specs=[
            grid.rows("i"),
            pl.BlockSpec((1, 1, *grid.saved[2:4], queries), grid.at(lambda b, g, i, j: (b, g, 0, 0, i))),
        ],
        out_shape=[
            shape((problem.batch, problem.q_tokens, problem.width), arrays[0].dtype),
            shape(grid.saved, f32),
        ],
        scratch_shapes=[
            pltpu.VMEM((heads, 1, queries), f32),
            pltpu.VMEM((heads, 1, queries), f32),
            pltpu.VMEM((heads, problem.head_dim, queries), f32),
        ],
        name="flash_online_forward",
    )(*_three(arrays), *[x for x in extras if x is not None])


def _three(arrays: tuple) -> tuple:
    return arrays * 3 if len(arrays) == 1 else arrays


# ---------------------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------------------


def _backward_inputs(grid: _Grid, step, refs, present):
    """Return readers of q, k, v and do, the refs of the statistics, and the extras."""
    after = 3 + len(grid.statistics())
    statistics, do_ref = refs[3:after], refs[after]
    read_do, _, _ = _inputs(grid, step, do_ref, *refs[1:3])
    return *_inputs(grid, step, *refs[:3]), read_do, statistics, ScoreExtras.of(refs[after + 1 :], present)


def _probabilities(grid: _Grid, step, extras, head, s, dp, statistics):
    """Return the probabilities and the scores' gradient, (keys, queries); zeros beyond the last query."""
    problem, queries = grid.problem, grid.blocks.queries
    lse, *others = (ref[0, 0, head : head + 1, :] for ref in statistics)
    ragged = problem.q_tokens % queries != 0
    if ragged:
        inside = lax.broadcasted_iota(jnp.int32, (1, queries), 1) < problem.q_tokens - step["i"] * queries
        lse, *others = jnp.where(inside, lse, _MASKED_LSE), *[jnp.where(inside, x, 0.0) for x in others]
    *factor, delta = others
    p = problem.exp(_scores(grid, step, extras, head, s) - lse)
    if factor:
        p = p * factor[0]
    if ragged and problem.may_lose_rows:
        p = jnp.where(inside, p, 0.0)  # the extras beyond the last query may be NaN
    return p, p * (dp - delta)


def _backward_kernel(*refs, grid: _Grid, present: tuple[bool, ...]):
    problem, blocks = grid.problem, grid.blocks
    step = grid.program()
    *inputs, dq_ref, dk_ref, dv_ref, dq_sum, dk_sum, dv_sum = refs
    read_q, read_k, read_v, read_do, statistics, extras = _backward_inputs(grid, step, inputs, present)
    head_windows = windows(blocks.heads, problem.head_dim)
    queries = pl.ds(pl.multiple_of(step["i"] * blocks.queries, LANES), blocks.queries)

    @pl.when(step["i"] == 0)
    def _():
        dk_sum[...] = jnp.zeros_like(dk_sum)
        dv_sum[...] = jnp.zeros_like(dv_sum)

    @pl.when(step["j"] == 0)
    def _():
        dq_sum[:, :, queries] = jnp.zeros_like(dq_sum[:, :, queries])

    def products(h):
        w = head_windows[h]
        s = dot(only_head(read_k(w), w), read_q(w), (1, 1))
        return s, dot(only_head(read_v(w), w), read_do(w), (1, 1))

    def accumulate(h, issued):
        w = head_windows[h]
        p, ds = _probabilities(grid, step, extras, h, *issued, statistics)
        q, k, do = read_q(w), read_k(w), read_do(w)
        p, ds = p.astype(q.dtype), ds.astype(q.dtype)
        dv_sum[h, :, : w.folded_size] += dot(p, do, (1, 0))
        dk_sum[h, :, : w.folded_size] += dot(ds, q, (1, 0))
        dq_sum[h, :, queries] += dot(transposed_head(k, w), ds, (1, 0))

    pipelined(range(blocks.heads), products, accumulate)
    last = blocks.heads - 1

    @pl.when(step["i"] == grid.n_queries - 1)
    def _():
        dk_tiles, dv_tiles = LaneTiles(partial(_store, dk_ref)), LaneTiles(partial(_store, dv_ref))
        for h, w in enumerate(head_windows):
            dk_tiles.add(dk_sum[h, :, : w.folded_size] * problem.scale, w, h == last)
            dv_tiles.add(dv_sum[h, :, : w.folded_size], w, h == last)

    @pl.when(step["j"] == grid.n_keys - 1)
    def _():
        def store(lane, value):
            dq_ref[0, queries, lane : lane + value.shape[1]] = value.astype(dq_ref.dtype)

        tiles = RowTiles(store)
        for h in range(blocks.heads):
            tiles.add(dq_sum[h, :, queries] * problem.scale, h == last)


def _bias_kernel(*refs, grid: _Grid, present: tuple[bool, ...]):
    """Recompute the scores' gradient; sum it over images, the innermost axis, and the bias's broadcast axes."""
    problem, blocks = grid.problem, grid.blocks
    step = grid.program()
    *inputs, dbias_ref = refs
    read_q, read_k, read_v, read_do, statistics, extras = _backward_inputs(grid, step, inputs, present)
    _, _, _, heads, m, n = dbias_ref.shape

    @pl.when((step["b"] == 0) if problem.bias[0] == 1 else True)
    def _():
        dbias_ref[...] = jnp.zeros_like(dbias_ref)

    for h, w in enumerate(windows(blocks.heads, problem.head_dim)):
        s = dot(only_head(read_k(w), w), read_q(w), (1, 1))
        dp = dot(only_head(read_v(w), w), read_do(w), (1, 1))
        _, ds = _probabilities(grid, step, extras, h, s, dp, statistics)
        if m == 1:
            ds = jnp.sum(ds, axis=0, keepdims=True)
        if n == 1:
            ds = jnp.sum(ds, axis=1, keepdims=True)
        dbias_ref[0, 0, 0, h if heads > 1 else 0] += ds


def _bias_gradient(problem: TpuProblem, sizes: PassBlocks, operands: tuple, extras: list, packed: bool):
    grid = _Grid(problem, sizes, packed, "gjib")
    b, h, n, m = problem.bias
    blocks = grid.blocks
    # Broadcast axes that the grid splits yield partial sums on additional leading axes.
    partial_j, partial_i = (grid.n_keys if m == 1 else 1), (grid.n_queries if n == 1 else 1)
    block = (1, 1, 1, blocks.heads if h > 1 else 1, blocks.keys if m > 1 else 1, blocks.queries if n > 1 else 1)

    shared = b == 1

    def place(b, g, i, j):
        return (j if m == 1 else 0, i if n == 1 else 0, 0 if shared else b, g, j if m > 1 else 0, i if n > 1 else 0)

    dbias = _call(
        partial(_bias_kernel, grid=grid, present=tuple(x is not None for x in extras)),
        grid,
        in_specs=[*grid.inputs(), *grid.statistics(), grid.rows("i"), *grid.extras(extras)],
        out_specs=pl.BlockSpec(block, grid.at(place)),
        out_shape=jax.ShapeDtypeStruct((partial_j, partial_i, b, h if h > 1 else grid.groups, m, n), f32),
        scratch_shapes=[],
        name="flash_online_bias_gradient",
    )(*operands)
    dbias = jnp.sum(dbias, axis=(0, 1))
    return jnp.swapaxes(dbias if h > 1 else jnp.sum(dbias, axis=1, keepdims=True), -1, -2)


def backward(
    problem: TpuProblem, sizes: PassBlocks, arrays: tuple, o_BNE, saved, do_BNE, bias, mask, ids, bias_gradient: bool
):
    """Return gradients shaped like `arrays`, and the bias's gradient in float32 (None unless requested)."""
    packed = len(arrays) == 1
    grid = _Grid(problem, sizes, packed, "bgji")
    B, N, M, D, heads = problem.batch, problem.q_tokens, problem.kv_tokens, problem.head_dim, grid.blocks.heads
    extras = extra_arrays(bias, mask, ids, transposed=True)
    delta_BNH = jnp.sum((o_BNE.astype(f32) * do_BNE.astype(f32)).reshape(B, N, problem.heads, D), axis=-1)
    # The forward pass may have grouped heads differently.
    per_query = [*(saved[:, :, n] for n in range(grid.saved[2])), delta_BNH.transpose(0, 2, 1)]
    statistics = [x.reshape(B, grid.groups, heads, N) for x in per_query]
    operands = (*_three(arrays), *statistics, do_BNE, *[x for x in extras if x is not None])
    padded = grid.n_queries * grid.blocks.queries
    window = max(w.folded_size for w in windows(heads, D))
    gradients = _call(
        partial(_backward_kernel, grid=grid, present=tuple(x is not None for x in extras)),
        grid,
        in_specs=[*grid.inputs(), *grid.statistics(), grid.rows("i"), *grid.extras(extras)],
        out_specs=[
            pl.BlockSpec((1, padded, grid.width), grid.at(lambda b, g, i, j: (b, 0, g))),
            grid.rows("j"),
            grid.rows("j"),
        ],
        out_shape=[jax.ShapeDtypeStruct((B, t, problem.width), arrays[0].dtype) for t in (N, M, M)],
        scratch_shapes=[
            pltpu.VMEM((heads, D, padded), f32),
            pltpu.VMEM((heads, grid.blocks.keys, window), f32),
            pltpu.VMEM((heads, grid.blocks.keys, window), f32),
        ],
        name="flash_online_backward",
    )(*operands)
    dbias = _bias_gradient(problem, sizes, operands, extras, packed) if bias_gradient else None
    return ([jnp.concatenate(gradients, axis=-1)] if packed else list(gradients)), dbias
