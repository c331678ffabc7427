"""The library's matrix product, with parameter gradients by Triton kernels."""

from torch import Tensor

from vitkernels.ops.linear.operators import linear
from vitkernels.ops.refusals import if_empty, unless_dtypes, unless_triton_device


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    return unless_triton_device("x", x) or unless_dtypes((x.dtype,)) or if_empty(weight_NK)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    return linear(x, weight_NK, weight_NK.detach().to(x.dtype), bias_N, is_qkv, "triton")
