"""Store two 4-bit integers per byte.

The low nibble of byte j is entry j of the packed dimension, the high nibble entry j + ⌈size/2⌉. Each half is
contiguous, so a kernel multiplies one half after the other and never interleaves nibbles.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError


def pack_int4(w: Tensor) -> Tensor:
    """Pack int8 in −8 … 7 into uint8, two in features per byte: (N, K) -> (N, ⌈K/2⌉), (S, B, N) -> (S, ⌈B/2⌉, N).

    Raises UsageError for another dtype, another number of dimensions, or values outside −8 … 7.
    """
    if w.dtype != torch.int8 or w.ndim not in (2, 3):
        raise UsageError(
            f"pack_int4 needs int8 with 2 or 3 dimensions, got {w.dtype} {tuple(w.shape)}",
            code="ops.quantized_matmul.pack", dtype=w.dtype, shape=tuple(w.shape),
        )  # fmt: skip
    if w.numel() and (int(w.min()) < -8 or int(w.max()) > 7):
        raise UsageError(
            f"4-bit weights must be in -8 to 7, got {int(w.min())} to {int(w.max())}",
            code="ops.quantized_matmul.pack_range", min=int(w.min()), max=int(w.max()),
        )  # fmt: skip
    half = -(-w.shape[1] // 2)
    low, high = w[:, :half], w[:, half:]
    if high.shape[1] < half:
        high = torch.cat([high, torch.zeros_like(w[:, :1])], 1)
    return ((low & 15) | (high << 4)).view(torch.uint8)


def unpack_int4(packed: Tensor, size: int) -> Tensor:
    """Return the int8 weights that `pack_int4` packed; `size` is their dimension 1, which may be odd."""
    if packed.dtype != torch.uint8 or packed.ndim not in (2, 3) or -(-size // 2) != packed.shape[1]:
        raise UsageError(
            f"unpack_int4 needs uint8 with {-(-size // 2)} bytes along dimension 1 for size={size}, "
            f"got {packed.dtype} {tuple(packed.shape)}",
            code="ops.quantized_matmul.unpack", dtype=packed.dtype, shape=tuple(packed.shape), size=size,
        )  # fmt: skip
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    nibbles = torch.cat([low, high], 1)[:, :size]
    return nibbles - ((nibbles & 8) << 1)
