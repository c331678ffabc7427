"""Generalized IoU and its gradient in Pallas for TPU, in XLA's layout of boxes.

4 values would waste most of 128 lanes, so XLA stores boxes (B, N, 4) with N on the lanes, in tiles of 4 × 128: x1 of
128 boxes, then their y1, and so on. The kernels read this memory as a matrix of 128 columns, without a copy, and load
every fourth row, so that a register holds one corner of 8 × 128 boxes. Two rows of bfloat16 form one row of 32-bit
words, with x in the lower and y in the upper halves.

Shape suffixes: B images, N boxes of each, 4 = x1, y1, x2, y2.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

f32, i32 = jnp.float32, jnp.int32
LANES = 128
TILES = 512  # tiles of 128 boxes per block: 1 MiB hides a copy's latency and leaves enough blocks to overlap copies


def giou(preds_BN4, targets_BN4, *, eps: float | None):
    """Return the GIoU (B, N) in float32."""
    return _call(_forward_kernel, (), (preds_BN4, targets_BN4), eps)[0]


def giou_vjp(primals, outputs, cotangents, *, eps: float | None):
    """Return the gradients of both arrays of boxes, in their dtype."""
    return tuple(_call(_backward_kernel, cotangents, primals, eps))


def _call(kernel, scores, boxes, eps):
    """Run `kernel` on scores (B, N), if any, and boxes (B, N, 4).

    With scores, the gradients of GIoU, it returns boxes, else scores.
    """
    B, N, _ = boxes[0].shape
    if B >= 32 and N <= 16 * LANES:
        images, width = B, -(-N // LANES) * LANES
    else:  # for few images or many boxes, treat each 128 boxes as an image
        images, width = -(-B * N // LANES), LANES
    group = partial(_group, images=images, width=width)
    b = min(-(-images // 8) * 8, max(8, TILES * LANES // width // 8 * 8))
    score_spec = pl.BlockSpec((b, width), lambda i: (i, 0))
    score_shape = jax.ShapeDtypeStruct((images, width), f32)
    rows = [_rows(group(x)) for x in boxes]
    block_rows = b * width // LANES * 4
    row_spec = pl.BlockSpec((block_rows, LANES), lambda i: (i, 0))
    scratch = [] if rows[0].dtype == f32 else [pltpu.VMEM((block_rows // 2, LANES), i32)] * len(rows)
    outputs = pl.pallas_call(
        partial(kernel, eps=eps),
        grid=(pl.cdiv(images, b),),
        in_specs=[score_spec] * len(scores) + [row_spec] * len(rows),
        out_specs=[row_spec] * len(rows) if scores else [score_spec],
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows] if scores else [score_shape],
        scratch_shapes=scratch,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )(*map(group, scores), *rows)
    if scores:
        outputs = [_boxes(y, images, width) for y in outputs]
    return [_ungroup(y, B, N) for y in outputs]


def _group(x, images: int, width: int):
    """Reshape (B, N, ...) to (images, width, ...), padded with zeros."""
    B, N, *rest = x.shape
    if images == B:
        return jnp.pad(x, [(0, 0), (0, width - N)] + [(0, 0)] * len(rest))
    flat = jnp.pad(x.reshape(B * N, *rest), [(0, images * width - B * N)] + [(0, 0)] * len(rest))
    return flat.reshape(images, width, *rest)


def _ungroup(x, B: int, N: int):
    """Undo `_group`."""
    if x.shape[0] == B:
        return x[:, :N]
    return x.reshape(-1, *x.shape[2:])[: B * N].reshape(B, N, *x.shape[2:])


def _rows(boxes):
    """Return (B, N, 4), N a multiple of 128, as the matrix of 128 columns that it is in memory, 4 rows per tile."""
    B, N, _ = boxes.shape
    return jnp.swapaxes(boxes.reshape(B, N // LANES, LANES, -1), 2, 3).reshape(-1, LANES)


def _boxes(rows, B: int, N: int):
    """Undo `_rows`."""
    return jnp.swapaxes(rows.reshape(B, N // LANES, 4, LANES), 2, 3).reshape(B, N, 4)


def _tiles(scores_ref):
    """Yield each tile of a block's images: its index into the scores, its number, and the number of tiles."""
    tiles = scores_ref.shape[1] // LANES
    for tile in range(tiles):
        yield (slice(None), slice(tile * LANES, (tile + 1) * LANES)), tile, tiles


def _rows_of(words, tile: int, tiles: int):
    """Return the index of each row of a tile, for all images of a block: 4 rows of float32, 2 of bfloat16 pairs."""
    rows = 4 if words.dtype == f32 else 2
    images = words.shape[0] // (rows * tiles)
    return [(pl.ds(tile * rows + row, images, tiles * rows), slice(None)) for row in range(rows)]


def _corners(words, tile: int, tiles: int):
    """Return x1, y1, x2, y2 of a tile, each (b, 128) in float32."""
    rows = [words[at] for at in _rows_of(words, tile, tiles)]
    if words.dtype == f32:
        return rows
    return [lax.bitcast_convert_type(half, f32) for word in rows for half in (word << 16, word & -65536)]


def _store_corners(words, tile: int, tiles: int, x1, y1, x2, y2):
    """Store the corners of a tile; the inverse of `_corners`."""
    if words.dtype == f32:
        values = x1, y1, x2, y2
    else:
        bits = [lax.bitcast_convert_type(v.astype(jnp.bfloat16).astype(f32), i32) for v in (x1, y1, x2, y2)]
        values = [lax.shift_right_logical(x, 16) | y for x, y in (bits[:2], bits[2:])]
    for at, value in zip(_rows_of(words, tile, tiles), values, strict=True):
        words[at] = value


def _words(refs, scratch):
    """Return blocks of boxes as 32-bit words: float32 blocks themselves, or scratch copies of bfloat16 blocks."""
    for ref, words in zip(refs, scratch, strict=False):
        words[...] = pltpu.bitcast(ref[...], i32)
    return scratch or refs


def _forward_kernel(preds_ref, targets_ref, out_ref, *scratch, eps):
    preds, targets = _words((preds_ref, targets_ref), scratch)
    for at, *tile in _tiles(out_ref):
        out_ref[at] = _giou(_corners(preds, *tile), _corners(targets, *tile), eps)


def _backward_kernel(grad_ref, preds_ref, targets_ref, d_preds_ref, d_targets_ref, *scratch, eps):
    preds, targets = _words((preds_ref, targets_ref), scratch)
    results = scratch or (
        d_preds_ref,
        d_targets_ref,
    )  # scratch is updated in place, tile by tile
    for at, *tile in _tiles(grad_ref):
        gradients = _gradients(grad_ref[at], _corners(preds, *tile), _corners(targets, *tile), eps)
        for words, corners in zip(results, gradients, strict=True):
            _store_corners(words, *tile, *corners)
    for ref, words in zip((d_preds_ref, d_targets_ref), scratch, strict=False):
        ref[...] = pltpu.bitcast(words[...], ref.dtype)


def _extents(p1, p2, t1, t2):
    """Return the extents of the intersection and of the enclosing box along one axis; negative if empty."""
    return jnp.minimum(p2, t2) - jnp.maximum(p1, t1), jnp.maximum(p2, t2) - jnp.minimum(p1, t1)


def _giou(preds, targets, eps):
    (px1, py1, px2, py2), (tx1, ty1, tx2, ty2) = preds, targets
    (width, hull_width), (height, hull_height) = _extents(px1, px2, tx1, tx2), _extents(py1, py2, ty1, ty2)
    if eps is None:
        width, height, hull_width, hull_height = (jnp.maximum(x, 0.0) for x in (width, height, hull_width, hull_height))
        intersection = width * height
    else:
        intersection = jnp.where((width > 0) & (height > 0), width * height, 0.0)
    hull = hull_width * hull_height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - intersection
    return intersection / (union + (eps or 0.0)) - (hull - union) / (hull + (eps or 0.0))


def _gradients(grad, preds, targets, eps):
    (px1, py1, px2, py2), (tx1, ty1, tx2, ty2) = preds, targets
    (width, hull_width), (height, hull_height) = _extents(px1, px2, tx1, tx2), _extents(py1, py2, ty1, ty2)
    if eps is None:
        # The gradient of a clamp passes at 0, as in PyTorch.
        along_x, along_y = (
            jnp.where(own >= 0, jnp.maximum(other, 0.0), 0.0) for own, other in ((width, height), (height, width))
        )
        hull_along_x, hull_along_y = (
            jnp.where(own >= 0, jnp.maximum(other, 0.0), 0.0)
            for own, other in ((hull_width, hull_height), (hull_height, hull_width))
        )
        width, hull_width = jnp.maximum(width, 0.0), jnp.maximum(hull_width, 0.0)
    else:
        meet = (width > 0) & (height > 0)
        along_x, along_y = jnp.where(meet, height, 0.0), jnp.where(meet, width, 0.0)
        hull_along_x, hull_along_y = hull_height, hull_width
    intersection, hull = along_x * width, hull_along_x * hull_width
    p_width, p_height, t_width, t_height = px2 - px1, py2 - py1, tx2 - tx1, ty2 - ty1
    union = p_width * p_height + t_width * t_height - intersection
    per_union, per_hull = 1.0 / (union + (eps or 0.0)), 1.0 / (hull + (eps or 0.0))
    d_union = grad * (per_hull - intersection * per_union * per_union)
    d_hull = grad * ((hull - union) * per_hull * per_hull - per_hull)
    d_intersection = grad * per_union - d_union
    d_x = _axis(px1, px2, tx1, tx2, d_intersection * along_x, d_hull * hull_along_x, d_union, p_height, t_height)
    d_y = _axis(py1, py2, ty1, ty2, d_intersection * along_y, d_hull * hull_along_y, d_union, p_width, t_width)
    (d_px1, d_px2, d_tx1, d_tx2), (d_py1, d_py2, d_ty1, d_ty2) = d_x, d_y
    return (d_px1, d_py1, d_px2, d_py2), (d_tx1, d_ty1, d_tx2, d_ty2)


def _axis(p1, p2, t1, t2, d_extent, d_hull, d_union, p_across, t_across):
    """Return the gradients of p1, p2, t1, t2 along one axis from those of the extents."""
    low, high = (
        _share(p1, t1),
        _share(p2, t2),
    )  # preds' share of a maximum, and targets' of a minimum
    return (
        -d_union * p_across - d_extent * low - d_hull * (1 - low),
        d_union * p_across + d_extent * (1 - high) + d_hull * high,
        -d_union * t_across - d_extent * (1 - low) - d_hull * low,
        d_union * t_across + d_extent * high + d_hull * (1 - high),
    )


def _share(a, b):
    """Return a's share of the gradient of max(a, b): 1, 0, or 0.5 for a tie."""
    return jnp.where(a > b, 1.0, jnp.where(a == b, 0.5, 0.0))
