"""Products of two 8-bit matrices whose rows have scales: the engine that measured fastest on each device.

Shape suffixes: M rows of a, N rows of b, K the summed dimension.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.library import register_fake

from vitkernels.bridge.operator import operator

if find_spec("triton"):
    from vitkernels.ops.int8_matmul import triton_product


@operator(
    "product_of_rows(Tensor a, Tensor b, Tensor a_scale, Tensor b_scale, Tensor? bias, ScalarType out_dtype) -> Tensor"
)
def product_of_rows(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype):
    """(a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias: both int8 with exact sums, or both fp8 (e4m3).

    On CUDA K must be a multiple of 16.
    """
    if a_MK.device.type == "cuda":
        if a_MK.dtype == torch.int8:
            return triton_product.product(a_MK, b_NK.T, out_dtype, a_scale_M, b_scale_N, bias_N=bias_N)
        bias_N = None if bias_N is None else bias_N.to(out_dtype)
        scales = {"scale_a": a_scale_M[:, None], "scale_b": b_scale_N[None]}
        return torch._scaled_mm(a_MK, b_NK.T, **scales, bias=bias_N, out_dtype=out_dtype, use_fast_accum=True)
    out_MN = _sums(a_MK, b_NK).float() * a_scale_M[:, None] * b_scale_N
    return (out_MN if bias_N is None else out_MN + bias_N).to(out_dtype)


def _sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    if a_MK.device.type != "xla":
        wide = torch.float64 if a_MK.dtype == torch.int8 else torch.float32  # float64 holds sums of integers exactly
        return a_MK.to(wide) @ b_NK.to(wide).T  # torch._int_mm on the CPU is slower than this by far
    import torch_xla

    sums = torch.int32 if a_MK.dtype == torch.int8 else torch.float32
    return torch_xla._XLAC._xla_dot_general(a_MK, b_NK, (([1], [1]), ([], [])), preferred_element_type=sums)


@register_fake("vitkernels::product_of_rows")
def _(a, b, a_scale, b_scale, bias, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
