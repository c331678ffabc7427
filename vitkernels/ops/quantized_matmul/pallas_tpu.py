"""The Pallas backend, for TPU and, interpreted, for the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.quantized_matmul import pallas_tpu_kernel

_product = pallas_op(pallas_tpu_kernel.quantized_matmul, name="quantized_matmul_tpu")

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> str | None:
    if x_MK.device.type not in ("cpu", "xla"):
        return f"its kernel is for TPU (device xla) and, interpreted, for cpu; got {x_MK.device.type}"
    if x_MK.dtype not in _DTYPES:
        return f"it sums in float32; {x_MK.dtype} would lose digits. Use backend='reference'"
    if w.dtype == torch.float8_e4m3fn:
        return "it multiplies int8; fp8 weights are for NVIDIA GPUs, or backend='reference'"
    if 0 in (*x_MK.shape, *w.shape):
        return "it has no empty calls"
    return None


def run(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> Tensor:
    given = [t.contiguous() for t in (zero_point, bias) if t is not None]
    return _product(
        x_MK.contiguous(),
        w.contiguous(),
        scale.contiguous(),
        *given,
        has_zero=zero_point is not None,
        has_bias=bias is not None,
        block_size=block_size,
        weight_bits=4 if w.dtype == torch.uint8 else 8,
        activation_bits=activation_bits,
    )
