"""Triton products with GELU, forward and backward, in their epilogues, for any NVIDIA GPU."""

from torch import Tensor

from vitkernels.ops.linear_gelu import triton as first_layer
from vitkernels.ops.mlp.operators import run_form, unsupported_second


def unsupported(
    x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2, tanh: bool, keep
) -> str | None:
    return first_layer.unsupported(x, weight1, bias1, tanh) or unsupported_second(first_layer, x, weight2, tanh)


def run(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2, tanh: bool, keep) -> Tensor:
    return run_form(x, weight1, bias1, weight2, bias2, tanh, keep, "triton")
