"""The reference: a float64 product, whose 53 bits represent every sum of up to 131071 products exactly."""

import torch
from torch import Tensor


def unsupported(*args) -> None:
    """Accept every call."""


def run(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    if x_MK.device.type == "xla":  # TPUs have no float64, but XLA multiplies integers
        return x_MK.int() @ w_KN.int()
    return (x_MK.double() @ w_KN.double()).to(torch.int32)
