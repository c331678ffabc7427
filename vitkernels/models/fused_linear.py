"""Linear layers over the op `linear`, and several linear layers of one input as one product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.module_swap import SwappedModule
from vitkernels.ops import linear


class FusedLinear(SwappedModule, nn.Linear):
    """nn.Linear over the op `linear`, whose backend computes the gradients.

    backend: the backend of the op.
    is_qkv: the output is attention's packed q, k and v, and k reaches the scores unchanged.
    """

    backend: str
    is_qkv: bool
    weights_in_float32 = True  # weight gradients are float32 even under autocast

    def forward(self, x: Tensor, add_bias: bool = True) -> Tensor:
        return self.with_parameters(x, self.weight, self.bias if add_bias else None)

    def with_parameters(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x weightᵀ + bias with this layer's backend."""
        return linear(x, weight, bias, is_qkv=self.is_qkv, backend=self.backend)


def linear_with(layer: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x weightᵀ + bias, computed as `layer`, a plain or fused linear layer, computes its product."""
    return layer.with_parameters(x, weight, bias) if type(layer) is FusedLinear else F.linear(x, weight, bias)


def joined_linear(x: Tensor, *layers: Any) -> Tensor:
    """Return the layers' outputs along the last axis: one product if all are plain or all fused (no hooks)."""
    weight, bias = _joined_parameters(layers)
    if weight is None:
        return torch.cat([layer(x) for layer in layers], dim=-1)
    return linear_with(layers[0], x, weight, bias)


def joined_product(x: Tensor, *layers: Any) -> tuple[Tensor, Tensor | None]:
    """Return `joined_linear` without its bias, and the bias; None for the bias if nothing remains to be added."""
    weight, bias = _joined_parameters(layers)
    return (joined_linear(x, *layers) if weight is None else linear_with(layers[0], x, weight, None)), bias


def _joined_parameters(layers: Sequence[Any]) -> tuple[Tensor | None, Tensor | None]:
    """Return the joined weight and bias. No weight if the modules themselves must run: quantized or adapted layers."""
    if {type(layer) for layer in layers} not in ({nn.Linear}, {FusedLinear}):
        return None, None
    if len(layers) == 1:
        return layers[0].weight, layers[0].bias
    bias = None
    if any(layer.bias is not None for layer in layers):
        biases = [layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        bias = torch.cat(biases)
    return torch.cat([layer.weight for layer in layers]), bias
