"""The reference in plain PyTorch, as timm writes it, against which all other backends are tested."""

import torch
from torch import Tensor
from torch.nn import functional as F


def unsupported(*args) -> None:
    """Accept every call."""


def run(images_BCHW: Tensor, weight_EChw: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    bias_E = None if bias_E is None else bias_E.to(dtype)
    with torch.autocast(images_BCHW.device.type, enabled=False):
        grid_BEHW = F.conv2d(images_BCHW.to(dtype), weight_EChw.to(dtype), bias_E, stride=weight_EChw.shape[2:])
    return grid_BEHW.flatten(2).transpose(1, 2)
