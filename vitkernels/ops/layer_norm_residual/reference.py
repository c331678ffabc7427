"""The reference in plain PyTorch, against which all other backends are tested."""

import torch
from torch import Tensor
from torch.nn import functional as F


def unsupported(*args) -> None:
    """Accept every call."""


def run(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    with torch.autocast(x.device.type, enabled=False):
        total = x.to(wide)
        if branch is not None:
            added = branch.to(wide)
            for factor, combine in ((branch_bias, torch.add), (layer_scale, torch.mul)):
                if factor is not None:
                    added = combine(added, factor.to(wide))
            if sample_scale is not None:
                added = added * sample_scale.detach().to(wide).view(-1, *[1] * (x.ndim - 1))
            total = total + added
        total = total.to(x.dtype)
        normed = F.layer_norm(total.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps)
    return total, normed.to(out_dtype)
