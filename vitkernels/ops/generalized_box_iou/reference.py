"""The reference in plain PyTorch, differentiated by autograd."""

import torch
from torch import Tensor


def unsupported(*args) -> None:
    """Accept every call."""


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    dtype = torch.promote_types(preds.dtype, torch.float32)
    px1, py1, px2, py2 = preds.to(dtype).unbind(-1)
    tx1, ty1, tx2, ty2 = targets.to(dtype).unbind(-1)
    width, height = torch.min(px2, tx2) - torch.max(px1, tx1), torch.min(py2, ty2) - torch.max(py1, ty1)
    hull_width, hull_height = torch.max(px2, tx2) - torch.min(px1, tx1), torch.max(py2, ty2) - torch.min(py1, ty1)
    if eps is None:
        intersection = width.clamp(min=0) * height.clamp(min=0)
        hull = hull_width.clamp(min=0) * hull_height.clamp(min=0)
        eps = 0.0
    else:
        intersection = torch.where((width > 0) & (height > 0), width * height, 0.0)
        hull = hull_width * hull_height
    union = (px2 - px1) * (py2 - py1) + (tx2 - tx1) * (ty2 - ty1) - intersection
    return intersection / (union + eps) - (hull - union) / (hull + eps)
