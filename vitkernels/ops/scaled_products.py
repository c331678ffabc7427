"""Products of two 8-bit matrices with one scale per row, by the kernel that measured fastest on each device.

Shape suffixes: M rows of a, N rows of b, K the summed dimension.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from vitkernels.bridge.operator import operator

if find_spec("triton"):
    from vitkernels.ops.int8_matmul import scaled, triton_long


@operator(
    "product_of_rows(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor"
)
def product_of_rows(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype):
    """Return (a · a_scale[:, None]) (b · b_scale[:, None])ᵀ + bias, (M, N), in out_dtype.

    a and b are both int8, with exact sums, or both fp8 (e4m3). Scales are float32, or None for ones. On CUDA, K must be
    a multiple of 16.
    """
    if a_MK.device.type == "cuda":
        if bias_N is None and triton_long.takes(a_MK, b_NK) and _stream_k_is_faster(a_MK, b_NK):
            return triton_long.product(a_MK, b_NK, out_dtype, a_scale_M, b_scale_N)
        if a_MK.dtype == torch.int8:
            return scaled.product(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype)
        return _scaled_mm(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype)
    out_MN = _sums(a_MK, b_NK).float()
    for scale in (None if a_scale_M is None else a_scale_M[:, None], b_scale_N):
        out_MN = out_MN if scale is None else out_MN * scale
    return (out_MN if bias_N is None else out_MN + bias_N).to(out_dtype)


def _stream_k_is_faster(a_MK: Tensor, b_NK: Tensor) -> bool:
    """Return whether triton_long is the fastest kernel. In fp8 the library is, unless it has few 128 x 128 tiles."""
    few = triton_long.programs_on(a_MK.device) // 3
    return a_MK.dtype == torch.int8 or -(-a_MK.shape[0] // 128) * -(-b_NK.shape[0] // 128) <= few


def _scaled_mm(a_MK, b_NK, a_scale_M, b_scale_N, bias_N, out_dtype) -> Tensor:
    """Multiply fp8 matrices by cuBLAS."""
    scale_a, scale_b = (
        torch.ones(len(t), device=t.device) if scale is None else scale
        for t, scale in ((a_MK, a_scale_M), (b_NK, b_scale_N))
    )
    options = {"scale_a": scale_a[:, None], "scale_b": scale_b[None], "out_dtype": out_dtype, "use_fast_accum": True}
    if bias_N is None or out_dtype == torch.float32:  # cuBLAS adds a bias only to 16-bit results
        out_MN = torch._scaled_mm(a_MK, b_NK.T, **options)
        return out_MN if bias_N is None else out_MN + bias_N
    return torch._scaled_mm(a_MK, b_NK.T, bias=bias_N.to(out_dtype), **options)


def _sums(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """Return a bᵀ without scales in plain PyTorch, or on XLA devices by its 8-bit product."""
    if a_MK.device.type != "xla":
        wide = torch.float64 if a_MK.dtype == torch.int8 else torch.float32  # float64 sums integers exactly
        return a_MK.to(wide) @ b_NK.to(wide).T  # on the CPU far faster than torch._int_mm
    import torch_xla

    sums = torch.int32 if a_MK.dtype == torch.int8 else torch.float32
    return torch_xla._XLAC._xla_dot_general(a_MK, b_NK, (([1], [1]), ([], [])), preferred_element_type=sums)


@product_of_rows.register_fake
def _(a, b, a_scale, b_scale, bias, out_dtype):
    return a.new_empty(a.shape[0], b.shape[0], dtype=out_dtype)
