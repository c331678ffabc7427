"""Apply torch.autocast's casts to the inputs of kernels that autocast does not know."""

import torch
from torch import Tensor


def dtype_of(x: Tensor) -> torch.dtype:
    """Return the dtype to compute `x` in: autocast's if it is enabled for the device of `x`, otherwise that of `x`.

    Autocast leaves float64, integers and meta tensors unchanged.
    """
    device_type = x.device.type
    # torch.amp.is_autocast_available would exclude meta, but torch.compile cannot trace it.
    unchanged = not x.is_floating_point() or x.dtype == torch.float64 or device_type == "meta"
    if unchanged or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, each in the dtype that autocast computes it in."""
    return tuple(x.to(dtype_of(x)) for x in tensors)
