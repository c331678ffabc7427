"""Generalized IoU and its gradient in Triton. Each thread processes complete boxes and moves 16 bytes at a time.

Shape suffixes: none; every tensor is a block of boxes.
"""

import triton
import triton.language as tl


@triton.jit
def _load_boxes(ptr, box, count, BLOCK: tl.constexpr, CALC: tl.constexpr):
    at = ptr + box[:, None] * 4 + tl.arange(0, 4)[None, :]
    corners = tl.load(at, mask=box[:, None] < count, other=0.0).to(CALC)
    x, y = tl.split(tl.reshape(corners, [BLOCK, 2, 2]))
    x1, x2 = tl.split(x)
    y1, y2 = tl.split(y)
    return x1, y1, x2, y2


@triton.jit
def _store_boxes(ptr, x1, y1, x2, y2, box, count, BLOCK: tl.constexpr):
    corners = tl.reshape(tl.join(tl.join(x1, x2), tl.join(y1, y2)), [BLOCK, 4])
    at = ptr + box[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, corners.to(ptr.dtype.element_ty), mask=box[:, None] < count)


@triton.jit
def _extents(p1, p2, t1, t2):
    """Return the extents of the intersection and of the enclosing box along one axis; negative if empty."""
    return tl.minimum(p2, t2) - tl.maximum(p1, t1), tl.maximum(p2, t2) - tl.minimum(p1, t1)


@triton.jit
def forward_kernel(preds_ptr, targets_ptr, out_ptr, eps, count, LOSS: tl.constexpr, BLOCK: tl.constexpr):
    """Compute GIoU: with LOSS with eps in the denominators, else with extents clamped at 0."""
    box = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    px1, py1, px2, py2 = _load_boxes(preds_ptr, box, count, BLOCK, out_ptr.dtype.element_ty)
    tx1, ty1, tx2, ty2 = _load_boxes(targets_ptr, box, count, BLOCK, out_ptr.dtype.element_ty)
    width, hull_width = _extents(px1, px2, tx1, tx2)
    height, hull_height = _extents(py1, py2, ty1, ty2)
    if LOSS:
        intersection = tl.where((width > 0) & (height > 0), width * height, 0.0)
    else:
        intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
        hull_width, hull_height = tl.maximum(hull_width, 0.0), tl.maximum(hull_height, 0.0)
    hull = hull_width * hull_height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - intersection
    if LOSS:
        giou = intersection / (union + eps) - (hull - union) / (hull + eps)
    else:
        giou = intersection / union - (hull - union) / hull
    tl.store(out_ptr + box, giou, mask=box < count)


@triton.jit
def _share(a, b):
    """Return a's share of the gradient of max(a, b): 1, 0, or 0.5 for a tie."""
    return tl.where(a > b, 1.0, tl.where(a == b, 0.5, 0.0))


@triton.jit
def _axis_gradients(p1, p2, t1, t2, d_extent, d_hull, d_area_p, d_area_t):
    """Return the corners' gradients along one axis from those of the extents of intersection, hull and both boxes."""
    d_p1 = -d_area_p - d_extent * _share(p1, t1) - d_hull * _share(t1, p1)
    d_p2 = d_area_p + d_extent * _share(t2, p2) + d_hull * _share(p2, t2)
    d_t1 = -d_area_t - d_extent * _share(t1, p1) - d_hull * _share(p1, t1)
    d_t2 = d_area_t + d_extent * _share(p2, t2) + d_hull * _share(t2, p2)
    return d_p1, d_p2, d_t1, d_t2


@triton.jit
def backward_kernel(
    grad_ptr, preds_ptr, targets_ptr, d_preds_ptr, d_targets_ptr, eps, count,
    LOSS: tl.constexpr, BLOCK: tl.constexpr, CALC: tl.constexpr,
):  # fmt: skip
    """Store gradients of preds, and of targets if d_targets_ptr is given, recomputing the forward pass."""
    box = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    px1, py1, px2, py2 = _load_boxes(preds_ptr, box, count, BLOCK, CALC)
    tx1, ty1, tx2, ty2 = _load_boxes(targets_ptr, box, count, BLOCK, CALC)
    grad = tl.load(grad_ptr + box, mask=box < count, other=0.0).to(CALC)
    width, hull_width = _extents(px1, px2, tx1, tx2)
    height, hull_height = _extents(py1, py2, ty1, ty2)
    if LOSS:
        meet = (width > 0) & (height > 0)
        along_x, along_y = tl.where(meet, height, 0.0), tl.where(meet, width, 0.0)
        hull_along_x, hull_along_y = hull_height, hull_width
        intersection, hull = along_x * width, hull_width * hull_height
    else:
        w, h = tl.maximum(width, 0.0), tl.maximum(height, 0.0)
        hull_w, hull_h = tl.maximum(hull_width, 0.0), tl.maximum(hull_height, 0.0)
        along_x, along_y = tl.where(width >= 0, h, 0.0), tl.where(height >= 0, w, 0.0)
        hull_along_x, hull_along_y = tl.where(hull_width >= 0, hull_h, 0.0), tl.where(hull_height >= 0, hull_w, 0.0)
        intersection, hull = w * h, hull_w * hull_h
    p_width, p_height, t_width, t_height = px2 - px1, py2 - py1, tx2 - tx1, ty2 - ty1
    union = p_width * p_height + t_width * t_height - intersection
    if LOSS:
        over_union, over_hull, outside = union + eps, hull + eps, hull - union
    else:
        over_union, over_hull, outside = union, hull, hull - union
    d_union = grad * (1.0 / over_hull - intersection / over_union / over_union)
    d_hull = grad * (outside / over_hull / over_hull - 1.0 / over_hull)
    d_intersection = grad / over_union - d_union
    d_px1, d_px2, d_tx1, d_tx2 = _axis_gradients(
        px1, px2, tx1, tx2, d_intersection * along_x, d_hull * hull_along_x, d_union * p_height, d_union * t_height
    )
    d_py1, d_py2, d_ty1, d_ty2 = _axis_gradients(
        py1, py2, ty1, ty2, d_intersection * along_y, d_hull * hull_along_y, d_union * p_width, d_union * t_width
    )
    _store_boxes(d_preds_ptr, d_px1, d_py1, d_px2, d_py2, box, count, BLOCK)
    if d_targets_ptr is not None:
        _store_boxes(d_targets_ptr, d_tx1, d_ty1, d_tx2, d_ty2, box, count, BLOCK)
