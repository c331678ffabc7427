"""Loss and gradient from one read of the logits: the backward pass only scales the saved gradient.

Shape suffixes: B rows (images), C classes.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.bridge.triton import next_power_of_2, triton_call
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device

_LARGEST_C = 65536  # a row must fit in the registers of one program


def unsupported(logits: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int) -> str | None:
    floating = [x.dtype for x in (logits, targets) if x.dtype.is_floating_point]
    reason = unless_triton_device("logits", logits) or unless_dtypes(floating)
    if reason is not None:
        return reason
    if logits.shape[1] > _LARGEST_C:
        return f"one program holds a row of at most {_LARGEST_C} classes, got {logits.shape[1]}"
    if targets.requires_grad:
        return "has no gradient for targets. Detach them, or use backend='reference'"
    return None


def run(logits_BC: Tensor, targets: Tensor, label_smoothing: float, ignore_index: int) -> Tensor:
    needs_gradient = torch.is_grad_enabled() and logits_BC.requires_grad
    return loss_and_gradient(logits_BC, targets, label_smoothing, ignore_index, needs_gradient)[0]


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _rows_kernel(
    logits_BC, targets, loss_B, counts_B, gradient_BC, stride_logits, C, smoothing, ignore_index,
    BLOCK_C: tl.constexpr, SOFT: tl.constexpr,
):  # fmt: skip
    """Compute a row's loss, its weight in the mean (0 if ignored, else 1), and its gradient."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_C)
    inside = columns < C
    x = tl.load(logits_BC + row * stride_logits + columns, mask=inside, other=float("-inf")).to(tl.float32)
    largest = tl.max(x, 0)
    exponentials = tl.exp(x - largest)
    total = tl.sum(exponentials, 0)
    log_total = largest + tl.log(total)
    softmax = exponentials / total
    x = tl.where(inside, x, 0.0)
    even = smoothing / C
    if SOFT:
        target = tl.load(targets + row * C + columns, mask=inside, other=0.0).to(tl.float32)
        target = tl.where(inside, target * (1.0 - smoothing) + even, 0.0)
        mass = tl.sum(target, 0)
        loss = mass * log_total - tl.sum(target * x, 0)
        count = 1.0
        gradient = softmax * mass - target
    else:
        number = tl.load(targets + row)
        known = (number >= 0) & (number < C)
        at_target = tl.load(logits_BC + row * stride_logits + number, mask=known, other=float("nan")).to(tl.float32)
        loss = (1.0 - smoothing) * (log_total - at_target)
        if smoothing > 0.0:
            loss += smoothing * log_total - even * tl.sum(x, 0)
        gradient = softmax - even - tl.where(columns == number, 1.0 - smoothing, 0.0)
        gradient = tl.where(known, gradient, float("nan"))
        count = 1.0
        if number == ignore_index:
            loss = 0.0
            count = 0.0
            gradient = tl.zeros([BLOCK_C], tl.float32)
    tl.store(loss_B + row, loss)
    tl.store(counts_B + row, count)
    if gradient_BC is not None:
        tl.store(gradient_BC + row * C + columns, gradient, mask=inside)


@triton.jit
def _mean_kernel(loss_B, counts_B, mean, counted, B, BLOCK_B: tl.constexpr):
    """Average the losses of the rows that are not ignored, in a fixed order."""
    loss = tl.zeros([BLOCK_B], tl.float32)
    count = tl.zeros([BLOCK_B], tl.float32)
    for start in range(0, B, BLOCK_B):
        rows = start + tl.arange(0, BLOCK_B)
        loss += tl.load(loss_B + rows, mask=rows < B, other=0.0)
        count += tl.load(counts_B + rows, mask=rows < B, other=0.0)
    total = tl.sum(count, 0)
    tl.store(mean, tl.where(total > 0, tl.sum(loss, 0) / tl.maximum(total, 1.0), float("nan")))
    tl.store(counted, total)


# --- operator ---------------------------------------------------------------------------------------------------------


@operator(
    "cross_entropy(Tensor logits, Tensor targets, float label_smoothing, int ignore_index, bool needs_gradient)"
    " -> (Tensor, Tensor, Tensor)"
)
def loss_and_gradient(logits, targets, label_smoothing, ignore_index, needs_gradient):
    """Return the mean loss, the number of rows in the mean, and the gradient of each row's loss in the logits' dtype.

    The gradient is empty unless needs_gradient.
    """
    dtype = logits.dtype
    logits, targets = interpretable(logits), interpretable(targets.contiguous())
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    B, C = logits.shape
    losses, counts = torch.empty(2, B, dtype=torch.float32, device=logits.device)
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format) if needs_gradient else None
    block = next_power_of_2(C)
    triton_call(
        logits, targets, losses, counts, gradient, logits.stride(0), C, float(label_smoothing), ignore_index,
        kernel=_rows_kernel, grid=(B,), BLOCK_C=block, SOFT=targets.dtype.is_floating_point,
        num_warps=min(16, max(1, block // 512)),
    )  # fmt: skip
    mean, counted = (losses.new_empty(()) for _ in range(2))
    triton_call(losses, counts, mean, counted, B, kernel=_mean_kernel, grid=(1,), BLOCK_B=1024, num_warps=4)
    return mean, counted, logits.new_empty(0, dtype=dtype) if gradient is None else gradient.to(dtype)


@loss_and_gradient.register_fake
def _(logits, targets, label_smoothing, ignore_index, needs_gradient):
    scalar = logits.new_empty((), dtype=torch.float32)
    return scalar, torch.empty_like(scalar), logits.new_empty(logits.shape if needs_gradient else 0)


def _save(ctx, inputs, output):
    _, count, gradient = output
    ctx.save_for_backward(count, gradient)
    ctx.mark_non_differentiable(count, gradient)


@differentiable_once("cross_entropy by triton")
def _scale(ctx, dloss, _dcount, _dgradient):
    count, gradient = ctx.saved_tensors
    # As in torch: if all rows are ignored, the gradient is zero although the mean is NaN.
    return gradient * (dloss / count.clamp(min=1)).to(torch.float32), None, None, None, None


loss_and_gradient.register_autograd(_scale, setup_context=_save)
