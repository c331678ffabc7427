"""8-bit quantization with one scale per row or column: Triton kernels on CUDA, plain PyTorch elsewhere.

Symmetric: value ≈ q · scale, with the row's largest magnitude at 127 (int8) or 448 (fp8, e4m3). Scales depend on the
tensor alone: nothing is sampled or carried over from earlier steps.

Shape suffixes: M rows (tokens), C columns (channels).
"""

from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.operator import operator
from vitkernels.ops.eight_bit_format import LARGEST, MIN_MAGNITUDE, padded

_COMPILED_WIDTH = 1024  # longest rows that Inductor holds in registers; it reads longer ones twice, 3 × slower

if find_spec("triton"):
    from vitkernels.ops.rowwise_quantization import triton as rowwise_triton
else:
    rowwise_triton = None  # type: ignore[assignment]


def quantize_rows(x_MC: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize rows: return q (M, C) and its scales (M,)."""
    x_MC = x_MC.contiguous()
    if torch.compiler.is_compiling() and x_MC.shape[1] <= _COMPILED_WIDTH:
        # The compiler fuses the rounding into the pass that computes x.
        return _quantized(x_MC.float(), dtype, 1)
    return _quantize_rows(x_MC, dtype)


@operator("quantize_rows(Tensor x, ScalarType dtype) -> (Tensor, Tensor)")
def _quantize_rows(x_MC, dtype):
    if x_MC.device.type == "cuda":
        return rowwise_triton.quantize_rows(x_MC, None, dtype, False)
    return _quantized(x_MC.float(), dtype, 1)


@operator("quantize_gelu(Tensor x, Tensor? gradient, ScalarType dtype) -> (Tensor, Tensor)")
def quantize_gelu(x_MC, gradient_MC, dtype):
    """Quantize rows of gelu(x), or of gradient · gelu'(x) if a gradient is given, in one pass."""
    x_MC, gradient_MC = x_MC.contiguous(), None if gradient_MC is None else gradient_MC.contiguous()
    if x_MC.device.type == "cuda":
        return rowwise_triton.quantize_rows(x_MC, gradient_MC, dtype, True)
    x = x_MC.float()
    value = F.gelu(x) if gradient_MC is None else torch.ops.aten.gelu_backward(gradient_MC.float(), x)
    return _quantized(value, dtype, 1)


@operator("transpose_rows(Tensor q, Tensor scale, bool sums) -> (Tensor, Tensor)")
def transpose_rows(q_MC, scale_M, sums):
    """Return qᵀ (C, padded(M)), and if `sums` the float32 sums (C,) over rows of q · scale, else an empty tensor."""
    if q_MC.device.type == "cuda":
        return rowwise_triton.transpose_rows(q_MC, scale_M, sums)
    return _transposed(q_MC), _sums(q_MC, scale_M, sums)


@operator(
    "quantize_columns(Tensor x, Tensor? factor, Tensor? other_factor, ScalarType dtype, bool sums)"
    " -> (Tensor, Tensor, Tensor)"
)
def quantize_columns(x_MC, factor_M, other_factor_M, dtype, sums):
    """Quantize columns of x · factor[:, None] · other_factor[:, None].

    Args:
        x_MC: floating point, or 8-bit with its scales as factor_M.
        factor_M, other_factor_M: both or neither.
        sums: whether to sum.

    Returns:
        qᵀ (C, padded(M)), its scales (C,), and if `sums` the float32 sums (C,) over rows of x · factor, else an empty
        tensor.
    """
    x_MC = x_MC.contiguous()
    if x_MC.device.type == "cuda":
        return rowwise_triton.quantize_columns(x_MC, factor_M, other_factor_M, dtype, sums)
    value = x_MC.float()
    if factor_M is not None:
        value = value * (factor_M * other_factor_M)[:, None]
    q, scale = _quantized(value, dtype, 0)
    return _transposed(q), scale, _sums(x_MC, factor_M, sums)


def _quantized(value: Tensor, dtype: torch.dtype, dim: int) -> tuple[Tensor, Tensor]:
    largest = LARGEST[dtype]
    top = value.abs().amax(dim, keepdim=True).clamp(min=MIN_MAGNITUDE) if value.numel() else value.new_empty(0)
    scaled = (value * (largest / top)).clamp(-largest, largest)
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), (top / largest).flatten()


def _transposed(q: Tensor) -> Tensor:
    bits = q if q.dtype == torch.int8 else q.view(torch.int8)  # some devices cannot copy 8-bit floats; XLA has no views
    out = F.pad(bits.T, (0, padded(q.shape[0]) - q.shape[0]))
    return out if q.dtype == torch.int8 else out.view(q.dtype)


def _sums(x_MC: Tensor, factor_M: Tensor | None, wanted: bool) -> Tensor:
    if not wanted:
        return x_MC.new_empty(0, dtype=torch.float32)
    return (x_MC.float() * factor_M[:, None]).sum(0)  # type: ignore[index]  # callers that want sums pass it


@_quantize_rows.register_fake
def _(x, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@quantize_gelu.register_fake
def _(x, gradient, dtype):
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(x.shape[0], dtype=torch.float32)


@transpose_rows.register_fake
def _(q, scale, sums):
    M, C = q.shape
    return q.new_empty(C, padded(M)), q.new_empty(C if sums else 0, dtype=torch.float32)


@quantize_columns.register_fake
def _(x, factor, other_factor, dtype, sums):
    M, C = x.shape
    made = [x.new_empty(size, dtype=torch.float32) for size in (C, C if sums else 0)]
    return x.new_empty(C, padded(M), dtype=dtype), *made
