"""Scaled int8 products by the faster of two kernels: Mosaic GPU's on NVIDIA Hopper if it takes the call, else Triton's.

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
    """Return (a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias, (M, N), with exact int32 sums.

    Scales are float32 and contiguous, or None for ones. The bias may have any strides.
    """
    bias_N = None if bias_N is None else bias_N.contiguous()
    if pallas_hopper_product.takes(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype):
        return pallas_hopper_product.product(
            a_MK,
            b_NK,
            a_scale_M,  # type: ignore[arg-type]  # `takes` refuses None
            b_scale_N,  # type: ignore[arg-type]
            bias_N,
            out_dtype,
        )
    return triton_product.product(a_MK, b_NK.T, out_dtype, a_scale_M, b_scale_N, bias_N=bias_N)
