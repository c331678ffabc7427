"""The library's matrix product, followed by one elementwise pass of a Triton kernel over its result.

The name says where GELU is computed: in separate elementwise passes, forward and backward, and not in the epilogue of a
product as in `triton` and `pallas_hopper`. The backward pass also sums the bias gradient. "auto" prefers `passes` on
GPUs without measurements: the library's products are faster than Triton's by more than the passes cost
(notes/fused_ops.md).
"""

from torch import Tensor

from vitkernels.ops.linear import triton as linear_backend
from vitkernels.ops.linear_gelu.operators import linear_gelu


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    return linear_backend.unsupported(x, weight_NK, bias_N, is_qkv=False)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    return linear_gelu(x, weight_NK, bias_N, tanh, False, "passes")[0]
