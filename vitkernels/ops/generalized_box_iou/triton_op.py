"""The Triton kernels as PyTorch operators: opaque to torch.compile, with gradients and fake outputs."""

import torch
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.bridge.triton import triton_call
from vitkernels.ops.generalized_box_iou.triton_kernel import backward_kernel, forward_kernel

# Four boxes per thread: the compiled code loads and stores 16 bytes at a time, keeps several loads in flight and rarely
# exchanges data between threads. With two boxes per thread the backward pass goes through shared memory.
_OPTIONS = {"BLOCK": 512, "num_warps": 4}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _launch(kernel, tensors, eps: float | None, count: int, **constants) -> None:
    if count:
        constants |= _OPTIONS | {"LOSS": eps is not None}
        grid = (-(-count // _OPTIONS["BLOCK"]),)
        triton_call(*tensors, eps or 0.0, count, kernel=kernel, grid=grid, **constants)


@operator("generalized_box_iou(Tensor preds, Tensor targets, float? eps) -> Tensor")
def giou(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    """Return the GIoU (...) of boxes (..., 4)."""
    out = preds.new_empty(preds.shape[:-1], dtype=_wide(preds.dtype))
    boxes = (interpretable(x).contiguous() for x in (preds, targets))
    _launch(forward_kernel, (*boxes, out), eps, out.numel())
    return out


@giou.register_fake
def _(preds, targets, eps):
    return preds.new_empty(preds.shape[:-1], dtype=_wide(preds.dtype))


@operator(
    "generalized_box_iou_backward(Tensor grad, Tensor preds, Tensor targets, float? eps, bool of_targets)"
    " -> (Tensor, Tensor)"
)
def giou_backward(
    grad: Tensor, preds: Tensor, targets: Tensor, eps: float | None, of_targets: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradients of preds and of targets, the latter empty unless of_targets."""
    inputs = [interpretable(x).contiguous() for x in (grad, preds, targets)]
    d_preds = torch.empty_like(inputs[1])
    d_targets = torch.empty_like(inputs[2]) if of_targets else None
    calc = tl.float64 if preds.dtype == torch.float64 else tl.float32
    _launch(backward_kernel, (*inputs, d_preds, d_targets), eps, grad.numel(), CALC=calc)
    return d_preds.to(preds.dtype), preds.new_empty(0) if d_targets is None else d_targets.to(targets.dtype)


@giou_backward.register_fake
def _(grad, preds, targets, eps, of_targets):
    shape = targets.shape if of_targets else (0,)
    return preds.new_empty(preds.shape), targets.new_empty(shape)


def _save(ctx, inputs, output):
    *boxes, ctx.eps = inputs
    ctx.save_for_backward(*boxes)


@differentiable_once("generalized_box_iou by triton")
def _differentiate(ctx, grad):
    of_preds, of_targets, _ = ctx.needs_input_grad
    d_preds, d_targets = giou_backward(grad, *ctx.saved_tensors, ctx.eps, of_targets)
    return d_preds if of_preds else None, d_targets if of_targets else None, None


giou.register_autograd(_differentiate, setup_context=_save)
