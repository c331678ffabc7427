"""Linear layers and MLPs that train with 8-bit matrix products; weights, gradients and optimizer state stay float32.

ops/eight_bit_products.py describes how the operands are rounded. On TPUs, kernels round them (ops/eight_bit_linear).
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitkernels.autocast import dtype_of
from vitkernels.module_swap import SwappedModule
from vitkernels.ops import eight_bit_linear, eight_bit_products

DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


class EightBitLinear(SwappedModule, nn.Linear):
    """nn.Linear that computes its three products in 8 bits.

    eight_bit: torch.int8 or torch.float8_e4m3fn.
    """

    eight_bit: torch.dtype
    weights_in_float32 = True  # weights are quantized from float32, not from autocast's dtype

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        return eight_bit_linear(x, self.weight, self.bias if add_bias else None, self.eight_bit)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.eight_bit}"


class EightBitMlp(nn.Module):
    """Linear, GELU, linear (timm's Mlp without dropout) with 8-bit products; shares the state of `mlp`.

    eight_bit: torch.int8 or torch.float8_e4m3fn.
    """

    weights_in_float32 = True  # weights are quantized from float32, not from autocast's dtype

    fc1: nn.Linear
    fc2: nn.Linear

    def __init__(self, mlp: nn.Module, eight_bit: torch.dtype):
        super().__init__()
        self.__dict__.update(mlp.__dict__)
        self.eight_bit = eight_bit

    def forward(self, x: Tensor) -> Tensor:
        x_MK = x.to(dtype_of(x)).reshape(-1, self.fc1.in_features)  # as nn.Linear casts its input under autocast
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        y_MN = eight_bit_products.mlp(x_MK, *weights, self.eight_bit)
        return y_MN.reshape(*x.shape[:-1], self.fc2.out_features)


def can_be_eight_bit_mlp(module: nn.Module) -> bool:
    """Return whether the module is linear, exact GELU, linear; other children must be identities or dropout of 0."""
    children: dict[str, Any] = dict(module.named_children())
    if list(children) not in (["fc1", "act", "fc2"], ["fc1", "act", "drop1", "norm", "fc2", "drop2"]):
        return False
    if not isinstance(children.get("norm", nn.Identity()), nn.Identity):
        return False
    if any(drop in children and children[drop].p > 0 for drop in ("drop1", "drop2")):
        return False
    return type(children["act"]) is nn.GELU and children["act"].approximate == "none"
