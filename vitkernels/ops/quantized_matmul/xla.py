"""torch_xla's own operations, on any XLA device: XLA multiplies 8-bit weights without converting them first.

Shape suffixes: M tokens, K in features, N out features, S blocks, B block size.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import operator
from vitkernels.ops.quantized_matmul.packing import unpack_int4
from vitkernels.ops.quantized_matmul.reference import quantize_tokens


def unsupported(x_MK, w, *args) -> str | None:
    if w.dtype == torch.float8_e4m3fn:
        return "supports int8 weights; fp8 weights need backend='triton' or 'reference'"
    return None if x_MK.device.type == "xla" else f"runs on torch_xla's devices; x is on {x_MK.device}"


def run(*args) -> Tensor:
    return _quantized_matmul(*args)


# An operator, because torch.compile(backend="openxla") traces with fake tensors, which XLA's functions do not accept.
@operator(
    "quantized_matmul_xla(Tensor x, Tensor w, Tensor scale, Tensor? zero_point, Tensor? bias, int block_size, "
    "int activation_bits) -> Tensor"
)
def _quantized_matmul(x_MK, w, scale, zero_point, bias, block_size, activation_bits):
    M, K = x_MK.shape
    if w.dtype == torch.uint8:
        w = unpack_int4(w, K if block_size == -1 else block_size)
    x, x_scale = x_MK, None
    if activation_bits == 8:
        x, x_scale = quantize_tokens(x.float())
        x = x.to(torch.int8)
    if block_size == -1:
        # The sum is rounded to x's dtype before it is scaled, as in torch_xla's own op.
        out = _dot(x, w, (([1], [1]), ([], [])), x.dtype).float() * scale.float()
        x_MS = x.float().sum(1, keepdim=True)
    else:
        x_MSB = x.reshape(M, -1, block_size)
        out_SMN = _dot(x_MSB, w, (([2], [1]), ([1], [0])), torch.float32)
        out, x_MS = (out_SMN * scale.float()[:, None]).sum(0), x_MSB.float().sum(2)
    if zero_point is not None:
        out = out - x_MS @ zero_point.float().reshape(x_MS.shape[1], -1)
    if x_scale is not None:
        out = out * x_scale
    return (out if bias is None else out + bias).to(x_MK.dtype)


def _dot(x: Tensor, w: Tensor, dimensions, dtype: torch.dtype) -> Tensor:
    """Return the product in `dtype`, or in int32 for int8 factors."""
    import torch_xla

    dtype = torch.int32 if x.dtype == torch.int8 else dtype
    return torch_xla._XLAC._xla_dot_general(x, w, dimensions, preferred_element_type=dtype)


@_quantized_matmul.register_fake
def _(x, w, scale, zero_point, bias, block_size, activation_bits):
    return x.new_empty(x.shape[0], scale.shape[-1])
