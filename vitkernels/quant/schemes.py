"""What is stored in how many bits, and how float weights become integers and scales.

Shape suffixes: K in features, N out features, S blocks of K, B block size.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.errors import UsageError
from vitkernels.ops.quantized_matmul import pack_int4

_NAME = re.compile(r"w(8|4)a(16|8)(_block\d*)?(_asym)?(_fp8)?")
_LEAST = 1e-12  # the least range of a group of weights: its scale divides
_LARGEST_FP8 = 448.0


@dataclass(frozen=True)
class Scheme:
    """Bits of weights (8 or 4) and activations (16: as they are; 8: rounded per token), and what shares a scale.

    block_size: in features that share a scale, or −1: all of an out feature's.
    symmetric: no zero point.
    fp8: both are floating (e4m3) and not integers, which NVIDIA GPUs since Hopper multiply faster; w8a8 alone.
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
                f"{self.activation_bits}"
            )
        if self.block_size != -1 and self.block_size < 2:
            raise UsageError(f"block_size must be -1 or at least 2, got {self.block_size}")
        if self.fp8 and (self.weight_bits, self.activation_bits, self.block_size, self.symmetric) != (8, 8, -1, True):
            raise UsageError(f"of the fp8 schemes there is w8a8_fp8 alone, got {self.name}")

    @classmethod
    def named(cls, name: str) -> "Scheme":
        """w8a8_fp8; or w8a16, w4a16, w8a8 or w4a8, then `_block<size>` (32 without a number, as conf/quant has it) and
        `_asym` where wanted: w4a16_block32_asym."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise UsageError(
                f"unknown scheme {name!r}; one is w8a8_fp8, or w8a16, w4a16, w8a8 or w4a8, then _block<size> and _asym "
                "where wanted, such as w4a16_block32_asym"
            )
        weight_bits, activation_bits, block, asym, fp8 = match.groups()
        block_size = -1 if block is None else int(block.removeprefix("_block") or 32)
        return cls(int(weight_bits), int(activation_bits), block_size, asym is None, fp8 is not None)

    @property
    def name(self) -> str:
        block = "" if self.block_size == -1 else f"_block{self.block_size}"
        kind = ("" if self.symmetric else "_asym") + ("_fp8" if self.fp8 else "")
        return f"w{self.weight_bits}a{self.activation_bits}{block}{kind}"

    @property
    def dtype(self) -> torch.dtype:
        """What weights are stored in: two 4-bit ones to a byte."""
        return torch.uint8 if self.weight_bits == 4 else torch.float8_e4m3fn if self.fp8 else torch.int8


def quantize_groups(groups: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """Round to nearest along the last dimension: q, scale and zero point (or None), groups ≈ q · scale − zero.

    q is int8, one number to a byte, or fp8. Symmetric: the largest magnitude at 2^(bits−1) − 1, in fp8 at 448.
    Asymmetric: least and greatest (or zero, if all lie on one side of it) at the ends of the range, the zero point
    rounded to a whole number of scales, so that zero stays zero.
    """
    groups = groups.float()
    top = 2 ** (scheme.weight_bits - 1) - 1
    if scheme.symmetric:
        scale = groups.abs().amax(-1, keepdim=True).clamp(min=_LEAST) / (_LARGEST_FP8 if scheme.fp8 else top)
        q = groups / scale
        return q.to(scheme.dtype) if scheme.fp8 else torch.round(q).to(torch.int8), scale[..., 0], None
    least, greatest = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
    scale = (greatest - least).clamp(min=_LEAST) / (2 * top + 1)
    zero = -top - 1 - torch.round(least / scale)
    q = (torch.round(groups / scale) + zero).clamp(-top - 1, top).to(torch.int8)
    return q, scale[..., 0], (zero * scale)[..., 0]


def stored_weight(K: int, N: int, scheme: Scheme) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """Shape and dtype of a linear layer's stored weight, and the shape of its scales.

    Raises UsageError where block_size does not divide the in features.
    """
    packed = scheme.weight_bits == 4
    if scheme.block_size == -1:
        return (N, -(-K // 2) if packed else K), scheme.dtype, (N,)
    if K % scheme.block_size:
        raise UsageError(f"block_size {scheme.block_size} does not divide the {K} in features")
    blocks = K // scheme.block_size
    return (blocks, -(-scheme.block_size // 2) if packed else scheme.block_size, N), scheme.dtype, (blocks, N)


def quantize_weight(weight_NK: Tensor, scheme: Scheme) -> tuple[Tensor, Tensor, Tensor | None]:
    """A linear layer's weight in torch_xla's layout: w, scale and zero point, as `quantized_matmul` takes them.

    Raises UsageError where block_size does not divide the in features.
    """
    N, K = weight_NK.shape
    stored_weight(K, N, scheme)
    blockwise = scheme.block_size != -1
    groups = weight_NK.detach().reshape(N, -1, scheme.block_size) if blockwise else weight_NK.detach()
    q, scale, zero = quantize_groups(groups, scheme)
    if blockwise:
        q, scale, zero = q.permute(1, 2, 0), scale.T.contiguous(), None if zero is None else zero.T.contiguous()
    return pack_int4(q) if scheme.weight_bits == 4 else q, scale, zero
