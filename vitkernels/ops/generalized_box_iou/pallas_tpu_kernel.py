"""Generalized IoU and its gradient in Pallas for TPU, on planes of corners.

XLA keeps an array of boxes (B, N, 4) with the corners outermost, because 4 values on 128 lanes would waste the rest; so
the kernels take it as (4, B, N), which costs no copy: x1 of many boxes side by side, then y1, and so on.

Shape suffixes: B images, N boxes of each, 4 = x1, y1, x2, y2.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

f32 = jnp.float32


def blocks_for(B: int, N: int) -> tuple[int, int]:
    """Images and boxes of a block: large enough to hide a copy's latency, several of them so that copies overlap."""
    n = min(N, 2048)
    return min(B, max(8, 32768 // (-(-n // 128) * 128) // 32 * 32)), n


def giou(preds_BN4, targets_BN4, *, eps: float | None, blocks: tuple[int, int] | None = None):
    """(B, N) in float32."""
    return _call(_forward_kernel, (), (preds_BN4, targets_BN4), [f32], eps, blocks)[0]


def giou_vjp(primals, outputs, cotangents, *, eps: float | None, blocks: tuple[int, int] | None = None):
    """Gradients of both arrays of boxes, in their own dtype."""
    dtypes = [x.dtype for x in primals]
    gradients = _call(_backward_kernel, cotangents, primals, dtypes, eps, blocks)
    return tuple(jnp.moveaxis(gradient, 0, 2) for gradient in gradients)


def _call(kernel, scores, boxes, out_dtypes, eps, blocks):
    """`kernel` on blocks of scores (B, N) and boxes (4, B, N); what it gives per corner is (4, B, N) too."""
    B, N, _ = boxes[0].shape
    b, n = blocks or blocks_for(B, N)
    score_spec = pl.BlockSpec((b, n), lambda i, j: (i, j))
    box_spec = pl.BlockSpec((4, b, n), lambda i, j: (0, i, j))
    out_spec, out_shape = (box_spec, (4, B, N)) if scores else (score_spec, (B, N))
    return pl.pallas_call(
        partial(kernel, eps=eps),
        grid=(pl.cdiv(B, b), pl.cdiv(N, n)),
        in_specs=[score_spec] * len(scores) + [box_spec] * len(boxes),
        out_specs=[out_spec] * len(out_dtypes),
        out_shape=[jax.ShapeDtypeStruct(out_shape, dtype) for dtype in out_dtypes],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
    )(*scores, *[jnp.moveaxis(x, 2, 0) for x in boxes])


def _corners(boxes_ref):
    return [boxes_ref[corner].astype(f32) for corner in range(4)]


def _extents(p1, p2, t1, t2):
    """Of the intersection and of the enclosing box along one axis; negative where there is none."""
    return jnp.minimum(p2, t2) - jnp.maximum(p1, t1), jnp.maximum(p2, t2) - jnp.minimum(p1, t1)


def _forward_kernel(preds_ref, targets_ref, out_ref, *, eps):
    px1, py1, px2, py2 = _corners(preds_ref)
    tx1, ty1, tx2, ty2 = _corners(targets_ref)
    (width, hull_width), (height, hull_height) = _extents(px1, px2, tx1, tx2), _extents(py1, py2, ty1, ty2)
    if eps is None:
        width, height, hull_width, hull_height = (jnp.maximum(x, 0.0) for x in (width, height, hull_width, hull_height))
        intersection = width * height
    else:
        intersection = jnp.where((width > 0) & (height > 0), width * height, 0.0)
    hull = hull_width * hull_height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - intersection
    out_ref[...] = intersection / (union + (eps or 0.0)) - (hull - union) / (hull + (eps or 0.0))


def _backward_kernel(grad_ref, preds_ref, targets_ref, d_preds_ref, d_targets_ref, *, eps):
    px1, py1, px2, py2 = _corners(preds_ref)
    tx1, ty1, tx2, ty2 = _corners(targets_ref)
    (width, hull_width), (height, hull_height) = _extents(px1, px2, tx1, tx2), _extents(py1, py2, ty1, ty2)
    if eps is None:
        # A clamp's gradient passes at 0 too, as in PyTorch.
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
    grad = grad_ref[...]
    d_union = grad * (per_hull - intersection * per_union * per_union)
    d_hull = grad * ((hull - union) * per_hull * per_hull - per_hull)
    d_intersection = grad * per_union - d_union
    d_x = _axis(px1, px2, tx1, tx2, d_intersection * along_x, d_hull * hull_along_x, d_union, p_height, t_height)
    d_y = _axis(py1, py2, ty1, ty2, d_intersection * along_y, d_hull * hull_along_y, d_union, p_width, t_width)
    for first, gradients in ((0, d_x), (1, d_y)):
        for (ref, corner), gradient in zip(
            ((d_preds_ref, first), (d_preds_ref, first + 2), (d_targets_ref, first), (d_targets_ref, first + 2)),
            gradients,
            strict=True,
        ):
            ref[corner] = gradient.astype(ref.dtype)


def _axis(p1, p2, t1, t2, d_extent, d_hull, d_union, p_across, t_across):
    """Gradients of p1, p2, t1, t2 on one axis, from those of the extents along it."""
    low, high = _share(p1, t1), _share(p2, t2)  # preds' part of a maximum; 1 less that is targets', and of a minimum
    return (
        -d_union * p_across - d_extent * low - d_hull * (1 - low),
        d_union * p_across + d_extent * (1 - high) + d_hull * high,
        -d_union * t_across - d_extent * (1 - low) - d_hull * low,
        d_union * t_across + d_extent * high + d_hull * (1 - high),
    )


def _share(a, b):
    """The part of a maximum's gradient that is a's: all, none, or half of a tie."""
    return jnp.where(a > b, 1.0, jnp.where(a == b, 0.5, 0.0))
