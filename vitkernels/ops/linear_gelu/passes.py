"""The library's matrix product, then bias and GELU, or their gradients, in one pass of a Triton kernel."""

from torch import Tensor

from vitkernels.ops.linear import triton as linear_backend
from vitkernels.ops.linear_gelu.operators import linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    return linear_backend.unsupported(x, weight_NK, bias_N, is_qkv=False)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "passes")[0]
