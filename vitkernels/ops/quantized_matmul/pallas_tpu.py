"""The Pallas backend for TPU, interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.quantized_matmul import pallas_tpu_kernel
from vitkernels.ops.refusals import if_empty, unless_dtypes, unless_tpu_device

_product = pallas_op(pallas_tpu_kernel.quantized_matmul, name="quantized_matmul_tpu")


def unsupported(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> str | None:
    if w.dtype == torch.float8_e4m3fn:
        return "supports int8 weights; fp8 weights need backend='triton' or 'reference'"
    return unless_tpu_device("x", x_MK) or unless_dtypes((x_MK.dtype,)) or if_empty(x_MK, w)


def run(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> Tensor:
    optional = [t.contiguous() for t in (zero_point, bias) if t is not None]
    return _product(
        x_MK.contiguous(),
        w.contiguous(),
        scale.contiguous(),
        *optional,
        has_zero=zero_point is not None,
        has_bias=bias is not None,
        block_size=block_size,
        weight_bits=4 if w.dtype == torch.uint8 else 8,
        activation_bits=activation_bits,
    )
