"""Products written for Hopper GPUs, with GELU, forward and backward, beside the multiplication."""

from torch import Tensor

from vitkernels.ops.linear_gelu import hopper as first_layer
from vitkernels.ops.mlp.operators import mlp, unsupported_second


def unsupported(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2, tanh: bool) -> str | None:
    return first_layer.unsupported(x, weight1, bias1, tanh) or unsupported_second(first_layer, x, weight2, tanh)


def run(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2, tanh: bool) -> Tensor:
    return mlp(x, weight1, bias1, weight2, bias2, tanh, "hopper")[0]
