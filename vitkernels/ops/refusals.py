"""Reasons for which several backends refuse a call: each function returns a sentence, or None to accept."""

from collections.abc import Iterable

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unless_triton_device(name: str, x: Tensor) -> str | None:
    """Accept CUDA tensors, and CPU tensors, which Triton interprets."""
    if x.device.type in ("cuda", "cpu"):
        return None
    return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; {name} is on {x.device}"


def unless_tpu_device(name: str, x: Tensor) -> str | None:
    """Accept XLA tensors, and CPU tensors, which Pallas interprets."""
    if x.device.type in ("xla", "cpu"):
        return None
    return f"Pallas TPU kernels run on XLA tensors, and interpreted on CPU tensors; {name} is on {x.device}"


def unless_dtypes(dtypes: Iterable[torch.dtype], supported: tuple[torch.dtype, ...] = FLOATS) -> str | None:
    """Accept the supported dtypes; others, such as float64, would lose digits in a kernel that computes in float32."""
    for dtype in dtypes:
        if dtype not in supported:
            names = [str(each).removeprefix("torch.") for each in supported]
            return f"supports {', '.join(names[:-1])} and {names[-1]}, got {dtype}. Use backend='reference'"
    return None


def if_empty(*tensors: Tensor) -> str | None:
    """Refuse tensors with a zero-sized dimension."""
    for x in tensors:
        if not x.numel():
            shape = tuple(x.shape)
            return f"does not support tensors with a zero-sized dimension, got {shape}. Use backend='reference'"
    return None
