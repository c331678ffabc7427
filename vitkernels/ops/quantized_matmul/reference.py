"""The reference in plain PyTorch, in float32, or in float64 if sums of integers must be exact.

Shape suffixes: M tokens, K in features, N out features, S blocks, B block size.
"""

import torch
from torch import Tensor

from vitkernels.ops.eight_bit_format import MIN_MAGNITUDE
from vitkernels.ops.quantized_matmul.packing import unpack_int4


def unsupported(*args) -> None:
    """Accept every call."""


def run(x_MK, w, scale, zero_point, bias, block_size, activation_bits) -> Tensor:
    M, K = x_MK.shape
    x, x_scale = x_MK.to(torch.promote_types(x_MK.dtype, torch.float32)), None
    if activation_bits == 8:
        x, x_scale = quantize_tokens(x) if w.dtype != torch.float8_e4m3fn else _quantize_tokens_to_fp8(x)
        x = x.to(torch.float64 if x.device.type != "xla" else torch.float32)  # TPUs have no float64
    w_SBN = blocks_of(w, K, block_size).to(x.dtype)
    x_MSB = x.reshape(M, *w_SBN.shape[:2])
    scale_SN = scale.reshape(w_SBN.shape[0], -1).to(x.dtype)
    out = torch.einsum("msn,sn->mn", torch.einsum("msb,sbn->msn", x_MSB, w_SBN), scale_SN)
    if zero_point is not None:
        out = out - x_MSB.sum(2) @ zero_point.reshape(scale_SN.shape).to(x.dtype)
    if x_scale is not None:
        out = out * x_scale
    if bias is not None:
        out = out + bias
    return out.to(x_MK.dtype)


def quantize_tokens(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return integers from −127 to 127 in x's dtype, and the scale (M, 1) of each token."""
    scale = x_MK.abs().amax(1, keepdim=True).clamp(min=MIN_MAGNITUDE) / 127
    return torch.round(x_MK / scale), scale


def _quantize_tokens_to_fp8(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    scale = x_MK.abs().amax(1, keepdim=True).clamp(min=MIN_MAGNITUDE) / 448
    return (x_MK / scale).to(torch.float8_e4m3fn).to(x_MK.dtype), scale


def blocks_of(w: Tensor, K: int, block_size: int) -> Tensor:
    """Return weights of any layout as (S, B, N), one weight per element."""
    if w.dtype == torch.uint8:
        w = unpack_int4(w, K if block_size == -1 else block_size)
    return w.T[None] if block_size == -1 else w


def dequantize(w: Tensor, scale: Tensor, zero_point: Tensor | None, K: int, block_size: int) -> Tensor:
    """Return the float32 weight (N, K) that w, scale and zero_point represent."""
    w_SBN = blocks_of(w, K, block_size)
    scale_SN = scale.reshape(w_SBN.shape[0], -1).float()
    weight_SBN = w_SBN.float() * scale_SN[:, None]
    if zero_point is not None:
        weight_SBN = weight_SBN - zero_point.reshape(scale_SN.shape).float()[:, None]
    return weight_SBN.reshape(K, -1).T.contiguous()
