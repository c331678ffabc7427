"""Two 4-bit integers to a byte.

A byte's low digit is entry j of the packed dimension, its high digit entry j + ⌈size/2⌉: both halves come out as
contiguous runs, so that a kernel multiplies one half after the other and never interleaves digits.
"""

import torch
from torch import Tensor

from vitkernels.errors import UsageError


def pack_int4(w: Tensor) -> Tensor:
    """int8 of −8 … 7 to uint8 of half the size along the in features: (N, K) to (N, ⌈K/2⌉), (S, B, N) to (S, ⌈B/2⌉, N).

    Raises UsageError for another dtype, another number of dimensions, or values that 4 bits cannot hold.
    """
    if w.dtype != torch.int8 or w.ndim not in (2, 3):
        raise UsageError(f"pack_int4 takes int8 of 2 or 3 dimensions, got {w.dtype} of shape {tuple(w.shape)}")
    if w.numel() and (int(w.min()) < -8 or int(w.max()) > 7):
        raise UsageError(f"4 bits hold -8 to 7; w runs from {int(w.min())} to {int(w.max())}")
    half = -(-w.shape[1] // 2)
    low, high = w[:, :half], w[:, half:]
    if high.shape[1] < half:
        high = torch.cat([high, torch.zeros_like(w[:, :1])], 1)
    return ((low & 15) | (high << 4)).view(torch.uint8)


def unpack_int4(packed: Tensor, size: int) -> Tensor:
    """What `pack_int4` packed, as int8; `size` is that of dimension 1 before packing, which may be odd."""
    if packed.dtype != torch.uint8 or packed.ndim not in (2, 3) or -(-size // 2) != packed.shape[1]:
        raise UsageError(
            f"unpack_int4 takes uint8 whose dimension 1 is half of size={size}, "
            f"got {packed.dtype} {tuple(packed.shape)}"
        )
    low, high = (packed & 15).to(torch.int8), (packed >> 4).to(torch.int8)
    digits = torch.cat([low, high], 1)[:, :size]
    return digits - ((digits & 8) << 1)
