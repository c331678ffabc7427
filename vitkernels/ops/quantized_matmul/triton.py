"""The Triton backend, for NVIDIA GPUs and, interpreted, for any CPU: tokens are rounded in one pass, where they are,
and a second kernel unpacks, multiplies, scales and adds the bias. Of many tokens products are made by the engine that
measured fastest, which is not always Triton (vitkernels.ops.int8_matmul.scaled, vitkernels.ops.scaled_products).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.operator import interpretable, operator
from vitkernels.ops import rowwise_quantization
from vitkernels.ops.int8_matmul import scaled
from vitkernels.ops.int8_matmul.triton_product import product as eight_bit_product
from vitkernels.ops.quantized_matmul.packing import unpack_int4
from vitkernels.ops.quantized_matmul.reference import dequantize
from vitkernels.ops.quantized_matmul.triton_product import product
from vitkernels.ops.rowwise_quantization import triton as rowwise_triton
from vitkernels.ops.scaled_products import product_of_rows

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MANY_TOKENS = 512


@operator(
    "quantized_matmul(Tensor x, Tensor? x_scale, Tensor w, Tensor scale, Tensor? zero_point, Tensor? bias, "
    "int block_size, int activation_bits, ScalarType out_dtype) -> Tensor"
)
def _quantized_matmul(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, out_dtype):
    """x is rounded already where x_scale is given."""
    x = interpretable(x.contiguous())
    if activation_bits == 8 and x_scale is None:
        x, x_scale = rowwise_triton.quantize_rows(x, None, _token_dtype(w), gelu=False)
    scale, zero_point, bias = (None if t is None else interpretable(t.contiguous()) for t in (scale, zero_point, bias))
    if w.dtype == torch.float8_e4m3fn:
        return _fp8(x, w, scale.float(), x_scale, bias, out_dtype)
    wide = torch.float32 if x.device.type == "cpu" and out_dtype == torch.bfloat16 else out_dtype
    form = _many_tokens if _is_bound_by_arithmetic(x) else product
    return form(x, w, scale, zero_point, x_scale, bias, block_size, wide).to(out_dtype)


def _token_dtype(w: Tensor) -> torch.dtype:
    return torch.int8 if w.dtype == torch.uint8 else w.dtype


def _many_tokens(x_MK, w, scale, zero_point, x_scale, bias, block_size, out_dtype):
    """Where arithmetic is what takes time, weights are unpacked once and not by every tile that reads them."""
    if x_scale is None:
        weight_NK = dequantize(w, scale, zero_point, x_MK.shape[1], block_size).to(x_MK.dtype)
        return F.linear(x_MK, weight_NK, None if bias is None else bias.to(x_MK.dtype))
    if block_size != -1 or zero_point is not None:
        return product(x_MK, w, scale, zero_point, x_scale, bias, block_size, out_dtype)
    w_NK = unpack_int4(w, x_MK.shape[1]) if w.dtype == torch.uint8 else w
    return scaled.product(x_MK, w_NK, x_scale, scale.float(), bias, out_dtype)


def _fp8(x_MK, w_NK, scale_N, x_scale_M, bias_N, out_dtype):
    """By PyTorch's own kernel where it takes the sizes: it was the faster one on an H200."""
    if 0 in (*x_MK.shape, *w_NK.shape) or x_MK.shape[1] % 16 or w_NK.shape[0] % 16:
        return eight_bit_product(x_MK, w_NK.T, out_dtype, x_scale_M, scale_N, bias_N=bias_N)
    return product_of_rows(x_MK, w_NK, x_scale_M, scale_N, bias_N, out_dtype)


def _is_bound_by_arithmetic(x_MK: Tensor) -> bool:
    return x_MK.shape[0] >= _MANY_TOKENS and x_MK.dtype != torch.float32


@torch.library.register_fake("vitkernels::quantized_matmul")
def _(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, out_dtype):
    return x.new_empty(x.shape[0], scale.shape[-1], dtype=out_dtype)


def unsupported(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> str | None:
    if x_MK.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {x_MK.device.type}"
    if w.dtype == torch.float8_e4m3fn and x_MK.device.type == "cpu":
        return "Triton's interpreter rounds to fp8 without a carry into the exponent; use backend='reference'"
    if w.dtype == torch.float8_e4m3fn and not _has_fp8(x_MK.device.index):
        return "fp8 needs a GPU of compute capability 8.9 or more"
    if x_MK.dtype not in _DTYPES:
        return f"it sums in float32; {x_MK.dtype} would lose digits. Use backend='reference'"
    return None


@torch.compiler.assume_constant_result
def _has_fp8(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def run(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> Tensor:
    x, x_scale = x_MK, None
    if activation_bits == 8 and torch.compiler.is_compiling():  # apart, so that the compiler may fuse the rounding
        x, x_scale = rowwise_quantization.quantize_rows(x_MK, _token_dtype(w))
    return _quantized_matmul(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, x_MK.dtype)
