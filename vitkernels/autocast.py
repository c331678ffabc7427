"""What torch.autocast would do to tensors that go to a kernel it does not know."""

import torch
from torch import Tensor


def dtype_of(x: Tensor) -> torch.dtype:
    """What x is calculated in: autocast's dtype where it is on for x's device; float64 and integers stay."""
    device_type = x.device.type
    # torch.amp.is_autocast_available knows that there is none for meta, but torch.compile cannot trace it.
    stays = not x.is_floating_point() or x.dtype == torch.float64 or device_type == "meta"
    if stays or not torch.is_autocast_enabled(device_type):
        return x.dtype
    return torch.get_autocast_dtype(device_type)


def cast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtypes that they are calculated in."""
    return tuple(x.to(dtype_of(x)) for x in tensors)
