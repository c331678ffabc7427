"""LayerNorm next to matrix products for TPU: before a product, and its gradient after the next product's gradient.

Products of a transformer are limited by the MXU, LayerNorm and residual additions by HBM. In one kernel both overlap:
the forward pass adds and normalizes the next rows while the MXU multiplies the current ones; the backward pass
differentiates LayerNorm on rows whose incoming gradient has just left the MXU, and which never reach HBM. The gradient
sums over tokens are taken from rows that are in VMEM anyway. The statistics are recomputed from the sum.

Without a weight the same kernels compute the op layer_norm_residual.

Shape suffixes: B images, N tokens, C channels, F features of the product.
"""

from functools import partial
from itertools import chain
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from vitkernels.bridge.pallas_schedule import pipelined
from vitkernels.ops.tpu_rows import (
    Matrix,
    RowBlocks,
    call,
    clear_sums,
    column_cuts,
    eight_bit_scratch,
    f32,
    gelu_and_slope,
    product,
    quantize,
    row_bytes,
    row_chunks,
    shared,
    size_to_round,
    sum_rows,
)

_TALL = 128  # rows of LayerNorm's gradient at a time: all their channels are in registers and spills
_PER_TOKEN = ("x", "branch", "dtotal", "dnormed", "dy", "total")
_RESULTS = ("normed", "y", "act", "saved", "dx", "dbranch")  # per token


def _specs(arrays: dict, blocks: RowBlocks) -> list[pl.BlockSpec]:
    specs = []
    for name, array in arrays.items():
        if name == "sample_scale":
            specs.append(pl.BlockSpec(memory_space=pltpu.SMEM))
        else:
            specs.append(blocks.spec(array.shape[2]) if name in _PER_TOKEN else shared(array))
    return specs


def _named(refs, names, blocks: RowBlocks) -> dict[str, Any]:
    """Return a kernel's references by name, those of arrays per token as matrices."""
    found = dict(zip(names, refs, strict=True))
    return found | {n: Matrix(ref, blocks) for n, ref in found.items() if n in (*_PER_TOKEN, *_RESULTS)}


def _blocks(arrays: dict, outputs: list[tuple[int, object]]) -> RowBlocks:
    """Return the blocks for these inputs by name, and outputs as (width, dtype) per token."""
    tokens = {name: x for name, x in arrays.items() if name in _PER_TOKEN}
    B, N, _ = next(iter(tokens.values())).shape
    resident = sum(row_bytes((x.shape[2], x.dtype)) * x.shape[1] for n, x in arrays.items() if n == "weight")
    return RowBlocks.of(B, N, row_bytes(*[(x.shape[2], x.dtype) for x in tokens.values()], *outputs), resident)


def _scaled(branch, refs: dict, blocks: RowBlocks, rows: slice, with_bias: bool):
    """Return branch (+ bias) · layer scale · sample scale of some rows."""
    if with_bias and "branch_bias" in refs:
        branch = branch + refs["branch_bias"][0].astype(f32)
    if "layer_scale" in refs:
        branch = branch * refs["layer_scale"][0].astype(f32)
    if "sample_scale" in refs:
        branch = branch * _sample_scale(refs, blocks, rows)
    return branch


def _sample_scale(refs: dict, blocks: RowBlocks, rows: slice):
    first = pl.program_id(0) * blocks.images
    return blocks.per_image(rows, lambda image: refs["sample_scale"][first + image])


def _total(r: dict, blocks: RowBlocks, rows: slice):
    """Return rows of the sum, as read or as added up by the forward pass."""
    if "total" in r:
        return r["total"][rows].astype(f32)
    branch = _scaled(r["branch"][rows].astype(f32), r, blocks, rows, with_bias=True)
    return (r["x"][rows].astype(f32) + branch).astype(r["x"].dtype).astype(f32)


def _statistics(total, eps: float):
    """Return (total - mean) / deviation and 1 / deviation of each row."""
    centred = total - jnp.mean(total, axis=1, keepdims=True)
    rstd = lax.rsqrt(jnp.mean(centred * centred, axis=1, keepdims=True) + eps)
    return centred * rstd, rstd


# ---------------------------------------------------------------------------------------------------------------------
# Forward
# ---------------------------------------------------------------------------------------------------------------------


def norm_forward(*arrays, given: tuple[str, ...], eps: float, out: str, gelu: str = "", keep: bool = False):
    """Return [total,] and normed or y or, with gelu, gelu(y) and saved.

    Args:
        arrays, given: arrays and their names: x (B, N, C), branch (B, N, C), gamma, beta, branch_bias, layer_scale
            (1, 1, C), sample_scale (B,), weight (1, F, C), bias (1, 1, F). Without a branch, total is x and is not
            returned; without gamma, x is multiplied as it is. With a weight, rounded to `out` in VMEM, y is the
            product; normed stays in VMEM.
            With weight_scale (1, 1, F), the weight is int8 (1, C, F), and the product's other factor is rounded to int8
            with a scale per row.
        out: dtype of normed and of the product.
        gelu: "", "none" (exact) or "tanh".
        keep: saved is gelu'(y), else y.
    """
    named = dict(zip(given, arrays, strict=True))
    x = named["x"]
    B, N, C = x.shape
    F = named["weight"].shape[2 if "weight_scale" in named else 1] if "weight" in named else 0
    results = [("total", C, x.dtype)] if "branch" in named else []
    results += [(name, F, out) for name in (("act", "saved") if gelu else ("y",))] if F else [("normed", C, out)]
    blocks = _blocks(named, [(width, dtype) for _, width, dtype in results])
    names = [*given, *[name for name, _, _ in results]]
    scratch = []
    if "weight_scale" in named:
        names += ["factor", "row_scale"]
        scratch += eight_bit_scratch(blocks, C)
    elif F and "gamma" in named:
        names.append("factor")
        scratch.append(pltpu.VMEM((blocks.height, C), jnp.dtype(out)))
    kernel = partial(_forward_kernel, names=tuple(names), blocks=blocks, eps=eps, gelu=gelu, keep=keep)
    outputs = [(blocks.spec(width), (B, N, width), dtype) for _, width, dtype in results]
    name, specs = f"layer_norm_{'linear' if F else 'residual'}_forward", _specs(named, blocks)
    rounds = size_to_round(named["weight"], jnp.dtype(out)) if F else 0
    return call(kernel, blocks, arrays, specs, outputs, name, scratch, rounds=rounds)


def _forward_kernel(*refs, names, blocks: RowBlocks, eps: float, gelu: str, keep: bool):
    r = _named(refs, names, blocks)
    factor = r["factor"] if "factor" in r else r["x"]

    def prepare(rows: slice):
        """Compute rows of the product's factor: x or the sum, normalized, rounded."""
        value = r["x"][rows].astype(f32)
        if "branch" in r:
            value = value + _scaled(r["branch"][rows].astype(f32), r, blocks, rows, with_bias=True)
            value = value.astype(r["total"].dtype).astype(f32)
            r["total"][rows] = value
        if "gamma" in r:
            value = _statistics(value, eps)[0] * r["gamma"][0].astype(f32) + r["beta"][0].astype(f32)
        if "row_scale" in r:
            factor[rows], r["row_scale"][rows] = quantize(value, axis=1)
        else:
            target: Any = r.get("normed", factor)
            target[rows] = value.astype(target.dtype)

    pieces = blocks.pieces()
    chunks = [row_chunks(piece) if factor is not r["x"] or "weight" not in r else [] for piece in pieces]
    if "weight" not in r:
        for chunk in chain.from_iterable(chunks):
            prepare(chunk)
        return
    for chunk in chunks[0]:
        prepare(chunk)
    columns = column_cuts(r["weight"].shape[2 if "row_scale" in r else 1])

    def multiply(item):
        piece, cut = item
        if "row_scale" in r:
            y = product(factor[pieces[piece]], r["weight"][0, :, columns[cut]], 0)
        else:
            y = product(factor[pieces[piece]], r["weight"][0, columns[cut]], 1)
        upcoming = chunks[piece + 1] if piece + 1 < len(chunks) else []
        share = -(-len(upcoming) // len(columns))
        for chunk in upcoming[cut * share : (cut + 1) * share]:
            prepare(chunk)
        return y

    def store(item, y):
        at = rows, cut = pieces[item[0]], columns[item[1]]
        if "row_scale" in r:
            y = y * r["row_scale"][rows] * r["weight_scale"][0, :, cut]
        if "bias" in r:
            y = y + r["bias"][0, :, cut].astype(f32)
        if not gelu:
            r["y"][at] = y
            return
        act, slope = gelu_and_slope(y, gelu == "tanh", exact=r["act"].dtype == f32)
        r["act"][at] = act
        r["saved"][at] = slope if keep else y

    pipelined([(p, c) for p in range(len(pieces)) for c in range(len(columns))], multiply, store)


# ---------------------------------------------------------------------------------------------------------------------
# Backward
# ---------------------------------------------------------------------------------------------------------------------


def norm_backward(*arrays, given: tuple[str, ...], eps: float, branch_dtype: str = ""):
    """Return dx [, dbranch], sums [, dbias, normed].

    Args:
        arrays, given: as in norm_forward: total (B, N, C), gamma, branch, branch_bias, layer_scale, sample_scale;
            dtotal (B, N, C), if total has a gradient; dnormed (B, N, C), or dy (B, N, F), weight (1, F, C) and beta.
            branch is needed with a layer_scale, or if x is given instead of total, which is then added up again. With
            weight_scale (1, 1, C), the weight is int8, and dy is rounded to int8 with a scale per row.
        branch_dtype: dtype of dbranch; "" for none, if it equals dx.

    sums (B, S, C) and dbias (B, 1, F), added over B, are float32 sums over all tokens: of gamma's and beta's gradient,
    then branch_bias' and layer_scale's, if given; dbias of dy. normed, in the dtype of dy, is what the weight's
    gradient needs: recomputed, it takes no memory between the passes.
    """
    named = dict(zip(given, arrays, strict=True))
    stream = named["total" if "total" in named else "x"]
    B, N, C = stream.shape
    kept = ["gamma", "beta", *[name for name in ("branch_bias", "layer_scale") if name in named]]
    results = [("dx", C, stream.dtype)] + ([("dbranch", C, branch_dtype)] if branch_dtype else [])
    recomputed = [(C, named["dy"].dtype)] if "dy" in named else []
    blocks = _blocks(named, [*[(width, dtype) for _, width, dtype in results], *recomputed])
    outputs = [(blocks.spec(width), (B, N, width), dtype) for _, width, dtype in results]
    outputs.append((blocks.sums(len(kept), C), (B, len(kept), C), f32))
    names = [*given, *[name for name, _, _ in results], "sums"]
    if "dy" in named:
        F = named["dy"].shape[2]
        outputs.append((blocks.sums(1, F), (B, 1, F), f32))
        outputs.append((blocks.spec(C), (B, N, C), named["dy"].dtype))
        names += ["dbias", "normed"]
    scratch = []
    if "weight_scale" in named:
        names += ["factor", "row_scale"]
        scratch = eight_bit_scratch(blocks, named["dy"].shape[2])
    kernel = partial(_backward_kernel, names=tuple(names), kept=tuple(kept), blocks=blocks, eps=eps)
    name, specs = f"layer_norm_{'linear' if 'dy' in named else 'residual'}_backward", _specs(named, blocks)
    rounds = size_to_round(named["weight"], named["dy"].dtype) if "dy" in named else 0
    return call(kernel, blocks, arrays, specs, outputs, name, scratch, rounds=rounds)


def _backward_kernel(*refs, names, kept: tuple[str, ...], blocks: RowBlocks, eps: float):
    r = _named(refs, names, blocks)
    gamma = r["gamma"][0].astype(f32)
    clear_sums(r["sums"])
    if "dbias" in r:
        clear_sums(r["dbias"])

    def finish(rows, dnormed):
        inside = blocks.inside(rows)
        dnormed = _rescaled(r, rows, dnormed)

        def add(name, terms):
            k = kept.index(name)
            r["sums"][0, k : k + 1] += sum_rows(terms, inside)

        if "dbias" in r:
            r["dbias"][0] += sum_rows(r["dy"][rows].astype(f32), inside)
        normed, rstd = _statistics(_total(r, blocks, rows), eps)
        if "normed" in r:
            r["normed"][rows] = normed * gamma + r["beta"][0].astype(f32)
        add("gamma", dnormed * normed)
        add("beta", dnormed)
        dnormed = dnormed * gamma
        along = jnp.mean(dnormed * normed, axis=1, keepdims=True)
        dx = (dnormed - normed * along - jnp.mean(dnormed, axis=1, keepdims=True)) * rstd
        if "dtotal" in r:
            dx = dx + r["dtotal"][rows].astype(f32)
        r["dx"][rows] = dx
        if "layer_scale" in r:
            branch = r["branch"][rows].astype(f32)
            if "branch_bias" in r:
                branch = branch + r["branch_bias"][0].astype(f32)
            scale = _sample_scale(r, blocks, rows) if "sample_scale" in r else 1.0
            add("layer_scale", dx * branch * scale)
        if "dbranch" not in r and "branch_bias" not in r:
            return
        dbranch = _scaled(dx, r, blocks, rows, with_bias=False)
        if "dbranch" in r:
            r["dbranch"][rows] = dbranch
        if "branch_bias" in r:
            add("branch_bias", dbranch)

    pipelined(blocks.pieces(_TALL), partial(_incoming, r), finish)


def _incoming(r: dict, rows: slice):
    """Return the gradient of the norm of some rows; in 8 bits without its scales."""
    if "dnormed" in r:
        return r["dnormed"][rows].astype(f32)
    if "row_scale" not in r:
        return product(r["dy"][rows], r["weight"][0], 0)
    for chunk in row_chunks(rows):
        r["factor"][chunk], r["row_scale"][chunk] = quantize(r["dy"][chunk].astype(f32), axis=1)
    return product(r["factor"][rows], r["weight"][0], 0)


def _rescaled(r: dict, rows: slice, dnormed):
    return dnormed * r["row_scale"][rows] * r["weight_scale"][0] if "row_scale" in r else dnormed
