"""The Triton backend for NVIDIA GPUs, interpreted on the CPU.

One kernel rounds tokens if requested, and a second one unpacks, multiplies, scales and adds the bias. For many tokens
the product uses the kernel that measured fastest, which is not always Triton's (vitkernels.ops.int8_matmul.scaled,
vitkernels.ops.scaled_products).
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
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device
from vitkernels.ops.rowwise_quantization import triton as rowwise_triton
from vitkernels.ops.scaled_products import product_of_rows

_MANY_TOKENS = 512  # from this number of tokens on, the product is compute-bound, not bound by reading the weights


@operator(
    "quantized_matmul(Tensor x, Tensor? x_scale, Tensor w, Tensor scale, Tensor? zero_point, Tensor? bias, "
    "int block_size, int activation_bits, ScalarType out_dtype) -> Tensor"
)
def _quantized_matmul(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, out_dtype):
    """Return the product. If x_scale is given, x is already rounded."""
    x = interpretable(x.contiguous())
    if activation_bits == 8 and x_scale is None:
        x, x_scale = rowwise_triton.quantize_rows(x, None, _token_dtype(w), gelu=False)
    scale, zero_point, bias = (None if t is None else interpretable(t.contiguous()) for t in (scale, zero_point, bias))
    if w.dtype == torch.float8_e4m3fn:
        return _fp8(x, w, scale.float(), x_scale, bias, out_dtype)
    wide = torch.float32 if x.device.type == "cpu" and out_dtype == torch.bfloat16 else out_dtype
    multiply = _compute_bound_product if _is_compute_bound(x) else product
    return multiply(x, w, scale, zero_point, x_scale, bias, block_size, wide).to(out_dtype)


def _token_dtype(w: Tensor) -> torch.dtype:
    return torch.int8 if w.dtype == torch.uint8 else w.dtype


def _compute_bound_product(x_MK, w, scale, zero_point, x_scale, bias, block_size, out_dtype):
    """Return the product by kernels that need unpacked weights, so that they are unpacked once and not per tile."""
    if x_scale is None:
        weight_NK = dequantize(w, scale, zero_point, x_MK.shape[1], block_size).to(x_MK.dtype)
        return F.linear(x_MK, weight_NK, None if bias is None else bias.to(x_MK.dtype))
    if block_size != -1 or zero_point is not None:
        return product(x_MK, w, scale, zero_point, x_scale, bias, block_size, out_dtype)
    w_NK = unpack_int4(w, x_MK.shape[1]) if w.dtype == torch.uint8 else w
    return scaled.product(x_MK, w_NK, x_scale, scale.float(), bias, out_dtype)


def _fp8(x_MK, w_NK, scale_N, x_scale_M, bias_N, out_dtype):
    """Return the fp8 product, by cuBLAS if it supports the sizes: it measured faster on an H200."""
    if 0 in (*x_MK.shape, *w_NK.shape) or x_MK.shape[1] % 16 or w_NK.shape[0] % 16:
        return eight_bit_product(x_MK, w_NK.T, out_dtype, x_scale_M, scale_N, bias_N=bias_N)
    return product_of_rows(x_MK, w_NK, x_scale_M, scale_N, bias_N, out_dtype)


def _is_compute_bound(x_MK: Tensor) -> bool:
    return x_MK.shape[0] >= _MANY_TOKENS and x_MK.dtype != torch.float32


@torch.library.register_fake("vitkernels::quantized_matmul")
def _(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, out_dtype):
    return x.new_empty(x.shape[0], scale.shape[-1], dtype=out_dtype)


def unsupported(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> str | None:
    reason = unless_triton_device("x", x_MK)
    if reason is not None:
        return reason
    if w.dtype == torch.float8_e4m3fn and x_MK.device.type == "cpu":
        return "Triton's interpreter rounds to fp8 without carrying into the exponent. Use backend='reference'"
    if w.dtype == torch.float8_e4m3fn and not _has_fp8(x_MK.device.index):
        return "fp8 needs a GPU of compute capability 8.9 or higher"
    return unless_dtypes((x_MK.dtype,))


@torch.compiler.assume_constant_result
def _has_fp8(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def run(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> Tensor:
    x, x_scale = x_MK, None
    if activation_bits == 8 and torch.compiler.is_compiling():  # outside: the compiler can fuse the rounding
        x, x_scale = rowwise_quantization.quantize_rows(x_MK, _token_dtype(w))
    return _quantized_matmul(x, x_scale, w, scale, zero_point, bias, block_size, activation_bits, x_MK.dtype)
