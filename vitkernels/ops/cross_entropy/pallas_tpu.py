"""Loss and gradient from one read of the logits, in Pallas for TPU; interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops.cross_entropy import pallas_tpu_kernel
from vitkernels.ops.refusals import unless_dtypes, unless_tpu_device

_rows = pallas_op(pallas_tpu_kernel.loss_and_gradient, name="cross_entropy_tpu", shard_batch=True)

_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST_C = 65536  # 16 rows of logits must fit into VMEM


def unsupported(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int) -> str | None:
    floating = [x.dtype for x in (logits, targets) if x.dtype.is_floating_point]
    reason = unless_tpu_device("logits", logits) or unless_dtypes(floating, _DTYPES)
    if reason is not None:
        return reason
    if logits.shape[1] > _LARGEST_C:
        return f"a block holds rows of at most {_LARGEST_C} classes, got {logits.shape[1]}"
    if targets.requires_grad:
        return "has no gradient for targets. Detach them, or use backend='reference'"
    return None


def run(logits_BC: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    return _CrossEntropy.apply(logits_BC, targets, float(label_smoothing), int(ignore_index))


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets, smoothing: float, ignore_index: int):
        if targets.dtype.is_floating_point:
            count = torch.full((), len(targets), dtype=torch.float32, device=logits.device)
        else:
            count = (targets != ignore_index).sum().float()
            known = (targets >= 0) & (targets < logits.shape[1]) | (targets == ignore_index)
            # Any invalid class number can replace an ignore_index that int32 cannot hold.
            targets = torch.where(known, targets, -1 if ignore_index != -1 else -2).to(torch.int32)[:, None]
        losses, gradient = _rows(
            logits.contiguous(), targets.contiguous(), smoothing=smoothing, ignore_index=ignore_index
        )
        ctx.save_for_backward(count, gradient)
        return losses.sum() / count  # the mean over no rows is NaN

    @staticmethod
    @differentiable_once("cross_entropy by pallas_tpu")
    def backward(ctx, dloss):
        count, gradient = ctx.saved_tensors
        # As in torch: if all rows are ignored, the gradient is zero although the mean is NaN.
        return (gradient * (dloss / count.clamp(min=1))).to(gradient.dtype), None, None, None
