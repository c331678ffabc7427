"""8-bit quantization with one scale per row or column, in Triton on CUDA (interpreted on CPUs for tests) and in torch.

Symmetric: value ≈ q · scale, the row's largest magnitude at 127 (int8) or 448 (fp8, e4m3). Nothing is sampled or
carried over from earlier steps. Shape suffixes: M rows (tokens), C columns (channels), P programs.
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.library import register_fake
from torch.nn import functional as F

from vitkernels.bridge.operator import operator

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
_LEAST = 1e-30  # a row whose largest value is below this counts as this: its reciprocal must stay finite
_ALIGNMENT = 16  # bytes: what matrix units want of a row's length

if find_spec("triton"):
    from vitkernels.quant.rowwise import triton as rowwise_triton
else:
    rowwise_triton = None


def padded(rows: int) -> int:
    """Columns of a transposed copy of so many rows; the last of them, beyond the rows, hold zeros."""
    return -(-rows // _ALIGNMENT) * _ALIGNMENT


@operator(
    "quantize_rows(Tensor x, Tensor? gradient, ScalarType dtype, bool gelu, bool transposed, bool sums)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def quantize_rows(x_MC, gradient_MC, dtype, gelu, transposed, sums):
    """Rows to 8 bits: q (M, C), its scales (M,), and where asked for qᵀ (C, padded(M)) and float32 sums (C,) of rows
    (with qᵀ, on CUDA, of rows as rounded: the errors of many tokens even out).

    gelu: gelu(x) is quantized in x's place, or gradient · gelu'(x) where there is a gradient. x is contiguous. What is
    not asked for is empty.
    """
    if x_MC.device.type == "cuda":
        return rowwise_triton.quantize_rows(x_MC, gradient_MC, dtype, gelu, transposed, sums)
    value = _activated(x_MC, gradient_MC, gelu)
    q, scale = _quantized(value, dtype, 1)
    qt = _transposed(q) if transposed else q.new_empty(0, 0)
    return q, scale, qt, value.sum(0) if sums else value.new_empty(0)


@operator("quantize_columns(Tensor x, Tensor? factor, Tensor? other_factor, ScalarType dtype) -> (Tensor, Tensor)")
def quantize_columns(x_MC, factor_M, other_factor_M, dtype):
    """Columns of x · factor[:, None] · other_factor[:, None] to 8 bits: qᵀ (C, padded(M)) and its scales (C,).

    x may be 8-bit itself, its scales among the factors.
    """
    if x_MC.device.type == "cuda":
        return rowwise_triton.quantize_columns(x_MC, factor_M, other_factor_M, dtype)
    value = x_MC.float()
    for factor in (factor_M, other_factor_M):
        value = value if factor is None else value * factor[:, None]
    q, scale = _quantized(value, dtype, 0)
    return _transposed(q), scale


def _activated(x, gradient, gelu) -> Tensor:
    x = x.float()
    if not gelu:
        return x
    if gradient is None:
        return F.gelu(x)
    return torch.ops.aten.gelu_backward(gradient.float(), x)


def _quantized(value: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    top = value.abs().amax(dim, keepdim=True).clamp(min=_LEAST) if value.numel() else value.new_empty(0)
    scaled = (value * (largest / top)).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), (top / largest).flatten()


def _transposed(q: Tensor) -> Tensor:
    out = torch.zeros(q.shape[1], padded(q.shape[0]), dtype=torch.int8, device=q.device)
    out[:, : q.shape[0]] = q.view(torch.int8).T  # as bits: not every device copies 8-bit floats
    return out.view(q.dtype)


@register_fake("vitkernels::quantize_rows")
def _(x, gradient, dtype, gelu, transposed, sums):
    M, C = x.shape
    qt = x.new_empty((C, padded(M)) if transposed else (0, 0), dtype=dtype)
    return (
        x.new_empty(M, C, dtype=dtype),
        x.new_empty(M, dtype=torch.float32),
        qt,
        x.new_empty(C if sums else 0, dtype=torch.float32),
    )


@register_fake("vitkernels::quantize_columns")
def _(x, factor, other_factor, dtype):
    M, C = x.shape
    return x.new_empty(C, padded(M), dtype=dtype), x.new_empty(C, dtype=torch.float32)
