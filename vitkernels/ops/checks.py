"""Checks of arguments that several ops share. Each raises UsageError with the code "ops.<op>.<what>"."""

from torch import Tensor

from vitkernels.errors import UsageError


def check_floating(op: str, name: str, tensor: Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Require a tensor of a floating-point dtype, and of the shape if one is given (codes: type, dtype, shape)."""
    if not isinstance(tensor, Tensor):
        raise UsageError(
            f"{name} must be a torch tensor, got {type(tensor).__name__}",
            code=f"ops.{op}.type", argument=name, type=type(tensor).__name__,
        )  # fmt: skip
    if not tensor.dtype.is_floating_point:
        raise UsageError(
            f"{name} must be floating point, got {tensor.dtype}",
            code=f"ops.{op}.dtype", argument=name, dtype=tensor.dtype,
        )  # fmt: skip
    if shape is not None and tuple(tensor.shape) != tuple(shape):
        raise UsageError(
            f"{name} must have shape {tuple(shape)}, got {tuple(tensor.shape)}",
            code=f"ops.{op}.shape", argument=name, shape=tuple(tensor.shape), expected=tuple(shape),
        )  # fmt: skip


def check_same_device(op: str, anchor: str, x: Tensor, **tensors: Tensor | None) -> None:
    """Require all tensors on the device of x, which messages call `anchor` (code: device)."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.device != x.device:
            raise UsageError(
                f"{name} is on {tensor.device} and {anchor} is on {x.device}; move them to one device",
                code=f"ops.{op}.device", argument=name, device=str(tensor.device), expected=str(x.device),
            )  # fmt: skip
