"""Quantization schemes, and the conversion of float weights to integers and scales.

Shape suffixes: K in features, N out features, S blocks of K, B block size.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.quantized_matmul import pack_int4

_NAME = re.compile(r"w(8|4)a(16|8)(_block\d*)?(_asym)?(_fp8)?")
_MIN_RANGE = 1e-12  # lower bound of a group's range, so that its scale is not zero
_LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Scheme:
    """Bits of weights and activations, and the weights that share a scale.

    weight_bits: 8 or 4.
    activation_bits: 16 for unquantized, 8 for quantized per token.
    block_size: number of in features that share a scale; −1 for one scale per out feature.
    symmetric: False adds a zero point per scale.
    fp8: e4m3 weights and activations instead of integers, faster on NVIDIA GPUs since Hopper; w8a8 only.

    Raises UsageError ("quant.scheme") for an unsupported combination.
    """

    weight_bits: int = 8
    activation_bits: int = 16
    block_size: int = -1
    symmetric: bool = True
    fp8: bool = False

    def __post_init__(self):
        if self.weight_bits not in (8, 4) or self.activation_bits not in (16, 8):
            raise UsageError(
                f"weight_bits must be 8 or 4 and activation_bits 16 or 8; got {self.weight_bits} and "
                f"{self.activation_bits}",
                code="quant.scheme",
                weight_bits=self.weight_bits,
                activation_bits=self.activation_bits,
            )
        if self.block_size != -1 and self.block_size < 2:
            message = f"block_size must be -1 or at least 2, got {self.block_size}"
            raise UsageError(message, code="quant.scheme", block_size=self.block_size)
        if self.fp8 and (self.weight_bits, self.activation_bits, self.block_size, self.symmetric) != (8, 8, -1, True):
            message = f"the only fp8 scheme is w8a8_fp8, got {self.name}"
            raise UsageError(message, code="quant.scheme", name=self.name)

    @classmethod
    def named(cls, name: str) -> "Scheme":
        """Return the scheme of a name such as "w8a8_fp8" or "w4a16_block32_asym".

        Names are w8a8_fp8, or w8a16, w4a16, w8a8 or w4a8 followed by an optional `_block<size>` (`_block` means 32) and
        an optional `_asym`. Raises UsageError ("quant.scheme") for any other name.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise UsageError(
                f"unknown scheme {name!r}; expected w8a8_fp8, or w8a16, w4a16, w8a8 or w4a8 with optional _block<size> "
                "and _asym, such as w4a16_block32_asym",
                code="quant.scheme",
                name=name,
            )
        weight_bits, activation_bits, block, asym, fp8 = match.groups()
        block_size = -1 if block is None else int(block.removeprefix("_block") or 32)
        return cls(int(weight_bits), int(activation_bits), block_size, asym is None, fp8 is not None)

    @property
    def name(self) -> str:
        """The name that `Scheme.named` accepts."""
        block = "" if self.block_size == -1 else f"_block{self.block_size}"
        kind = ("" if self.symmetric else "_asym") + ("_fp8" if self.fp8 else "")
        return f"w{self.weight_bits}a{self.activation_bits}{block}{kind}"

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that stores weights; uint8 holds two 4-bit weights per byte."""
        return torch.uint8 if self.weight_bits == 4 else torch.float8_e4m3fn if self.fp8 else torch.int8


def quantize_groups(groups: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round each group of the last dimension to nearest: return (q, scale, zero point), groups ≈ q · scale − zero.

    q: int8, one number per byte, or fp8; scale: the shape of `groups` without its last dimension; zero point: the
    same, None if symmetric. Symmetric schemes map the largest magnitude to 2^(bits−1) − 1, or 448 in fp8. Asymmetric
    ones map the minimum (at most 0) and the maximum (at least 0) to the ends of the integer range, with the zero point
    an integer multiple of the scale, so that zero is represented exactly.
    """
    groups = groups.float()
    top = 2 ** (scheme.weight_bits - 1) - 1
    if scheme.symmetric:
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=_MIN_RANGE) / (_LARGEST_FP8 if scheme.fp8 else top)
        q = groups / scale
        return q.to(scheme.dtype) if scheme.fp8 else torch.round(q).to(torch.int8), scale[..., 0], None
    lowest, highest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (highest - lowest).clamp(min=_MIN_RANGE) / (2 * top + 1)
    zero = -top - 1 - torch.round(lowest / scale)
    q = (torch.round(groups / scale) + zero).clamp(-top - 1, top).to(torch.int8)
    return q, scale[..., 0], (zero * scale)[..., 0]


def stored_weight(K: int, N: int, scheme: Scheme) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """Return the shape and dtype of a linear layer's stored weight, and the shape of its scales.

    K: in features; N: out features. Raises UsageError ("quant.block_size") if block_size does not divide K.
    """
    packed = scheme.weight_bits == 4
    if scheme.block_size == -1:
        return (N, -(-K // 2) if packed else K), scheme.dtype, (N,)
    if K % scheme.block_size:
        message = f"block_size {scheme.block_size} does not divide the {K} in features"
        raise UsageError(message, code="quant.block_size", block_size=scheme.block_size, in_features=K)
    blocks = K // scheme.block_size
    return (blocks, -(-scheme.block_size // 2) if packed else scheme.block_size, N), scheme.dtype, (blocks, N)


def quantize_weight(weight_NK: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a linear layer's weight in the form of `quantized_matmul`: w, scale and zero point in torch_xla's layout.

    Raises UsageError ("quant.block_size") if block_size does not divide the in features.
    """
    N, K = weight_NK.shape
    stored_weight(K, N, scheme)
    blockwise = scheme.block_size != -1
    groups = weight_NK.detach().reshape(N, -1, scheme.block_size) if blockwise else weight_NK.detach()
    q, scale, zero = quantize_groups(groups, scheme)
    if blockwise:
        q, scale, zero = q.permute(1, 2, 0), scale.T.contiguous(), None if zero is None else zero.T.contiguous()
    return pack_int4(q) if scheme.weight_bits == 4 else q, scale, zero
