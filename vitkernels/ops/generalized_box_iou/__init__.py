"""generalized_box_iou: how well each predicted box matches its own target, and the loss based on it.

    giou_BN = generalized_box_iou(preds_BN4, targets_BN4)
    loss = GeneralizedBoxIoULoss(reduction="mean")(preds_BN4, targets_BN4)

Shape suffixes: B images, N boxes per image, 4 = x1, y1, x2, y2.
"""

from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.ops.checks import check_same_device
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)


def generalized_box_iou(preds_BN4: Tensor, targets_BN4: Tensor, *, backend: str = "auto") -> Tensor:
    """Return the GIoU of each pair of boxes, in [-1, 1].

    GIoU is IoU minus the share of the smallest enclosing box that the union of the boxes does not cover. The result
    equals the diagonal of torchvision.ops.generalized_box_iou, also for degenerate boxes: two coincident points have
    neither union nor enclosing box and give NaN, and inverted extents (x2 < x1) count as in torchvision.

    Args:
        preds_BN4, targets_BN4: corners (x1, y1, x2, y2) in any unit, two tensors of the same shape (..., 4). float32,
            bfloat16 and float16 are computed in float32; float64 in float64; integers are converted to float32.
        backend: "auto" or a name from BACKENDS.names().

    Returns:
        (...) in float32 (float64 for float64). Differentiable once in both arguments; ties share a gradient equally.

    Raises:
        UsageError (a ValueError): invalid shapes, dtypes or devices, or a named backend that cannot take the call.

    Works with torch.compile and torch.jit.trace. torch.jit.script does not support keyword-only arguments with
    defaults.

    Source: Rezatofighi et al. 2019, arXiv 1902.09630.
    """
    return _giou(preds_BN4, targets_BN4, None, backend)


def generalized_box_iou_loss(
    preds_BN4: Tensor, targets_BN4: Tensor, reduction: str = "none", eps: float = 1e-7, *, backend: str = "auto"
) -> Tensor:
    """Return 1 - GIoU with the arguments, values and gradients of torchvision.ops.generalized_box_iou_loss.

    Unlike the metric, the loss adds `eps` to both denominators, so degenerate boxes give finite values, and does not
    clamp the extents of the enclosing box.

    reduction: "none", "mean" (0 for no boxes) or "sum".
    """
    _check_reduction(reduction)
    loss = 1 - _giou(preds_BN4, targets_BN4, float(eps), backend)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" and loss.numel() else loss.sum()


class GeneralizedBoxIoULoss(nn.Module):
    """`generalized_box_iou_loss` as a module."""

    def __init__(self, reduction: str = "none", eps: float = 1e-7, backend: str = "auto"):
        super().__init__()
        _check_reduction(reduction)
        self.reduction, self.eps, self.backend = reduction, eps, backend

    def forward(self, preds_BN4: Tensor, targets_BN4: Tensor) -> Tensor:
        return generalized_box_iou_loss(preds_BN4, targets_BN4, self.reduction, self.eps, backend=self.backend)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}, eps={self.eps}, backend={self.backend!r}"


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):  # torchvision's tests match the beginning of its message
        raise UsageError(
            f"Invalid reduction {reduction!r}; known: none, mean, sum",
            code="ops.generalized_box_iou.reduction", reduction=reduction,
        )  # fmt: skip


def _giou(preds: Tensor, targets: Tensor, eps: float | None, backend: str) -> Tensor:
    """Return the metric, with extents clamped at 0, for eps None, else the loss's form with eps in the denominators."""
    if preds.shape != targets.shape or preds.ndim == 0 or preds.shape[-1] != 4:
        raise UsageError(
            "preds and targets must be boxes of the same shape (..., 4), got "
            f"{tuple(preds.shape)} and {tuple(targets.shape)}; use .expand() to broadcast",
            code="ops.generalized_box_iou.shape", preds=tuple(preds.shape), targets=tuple(targets.shape),
        )  # fmt: skip
    check_same_device("generalized_box_iou", "preds", preds, targets=targets)
    preds, targets = (x if x.dtype.is_floating_point else x.float() for x in (preds, targets))
    if preds.dtype != targets.dtype or preds.dtype.itemsize < 2:
        raise UsageError(
            f"preds are {preds.dtype} and targets {targets.dtype}; pass both as one of bfloat16, float16, float32 and "
            "float64",
            code="ops.generalized_box_iou.dtype", preds=preds.dtype, targets=targets.dtype,
        )  # fmt: skip
    return BACKENDS.pick(backend, preds.device, preds, targets, eps).run(preds, targets, eps)
