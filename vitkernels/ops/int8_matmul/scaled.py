"""int8 products whose rows have scales, by the faster of two engines: on NVIDIA Hopper the Mosaic-GPU kernel for what
it takes (pallas_hopper_product.takes says what that is), everywhere else Triton's.

Shape suffixes: M rows of a, N rows of b, K the summed dimension.
"""

import torch
from torch import Tensor

from vitkernels.ops.int8_matmul import pallas_hopper_product, triton_product


def product(
    a_MK: Tensor,
    b_NK: Tensor,
    a_scale_M: Tensor | None,
    b_scale_N: Tensor | None,
    bias_N: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """(a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias (M, N) with exact sums. Scales: float32, contiguous; None:
    ones."""
    bias_N = None if bias_N is None else bias_N.contiguous()  # a model's own, of any strides
    if pallas_hopper_product.takes(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype):
        return pallas_hopper_product.product(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype)
    return triton_product.product(a_MK, b_NK.T, out_dtype, a_scale_M, b_scale_N, bias_N=bias_N)
