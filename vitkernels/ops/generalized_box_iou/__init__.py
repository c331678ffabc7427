"""generalized_box_iou: how well each predicted box fits its own target, and the loss made of it.

    giou_BN = generalized_box_iou(preds_BN4, targets_BN4)
    loss = GeneralizedBoxIoULoss(reduction="mean")(preds_BN4, targets_BN4)

Shape suffixes: B images, N boxes of each, 4 = x1, y1, x2, y2.
"""

from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.registry.op import Op

BACKENDS = Op.in_folder(
    __name__,
    ("reference", "triton", "pallas_tpu"),
    auto={"cuda": ("triton",), "tpu": ("pallas_tpu",)},
)


def generalized_box_iou(preds_BN4: Tensor, targets_BN4: Tensor, *, backend: str = "auto") -> Tensor:
    """IoU less the part of the smallest enclosing box that neither box covers, for each pair of boxes: in [-1, 1].

    preds, targets: corners (x1, y1, x2, y2) in any unit; of one shape (..., 4), any leading dimensions and sizes.
        float32, bfloat16 or float16, calculated in float32; float64; integers are taken as float32.
    backend: "auto" (the fastest that takes the call here) or one of BACKENDS.names().

    Returns (...) in float32 (float64 for float64). Differentiable, once, in both; ties share a gradient equally.
    Equals the diagonal of torchvision.ops.generalized_box_iou, degenerate boxes included: two points at one place have
    neither union nor enclosing box, and give NaN; extents turned inside out (x2 < x1) count as torchvision counts them.

    For torch.compile and torch.jit.trace, not torch.jit.script, which knows no keyword-only arguments with defaults.

    Raises UsageError for shapes, dtypes and devices that do not fit, and where the named backend cannot run.
    Source: Rezatofighi et al. 2019, arXiv 1902.09630.
    """
    return _giou(preds_BN4, targets_BN4, None, backend)


def generalized_box_iou_loss(
    preds_BN4: Tensor, targets_BN4: Tensor, reduction: str = "none", eps: float = 1e-7, *, backend: str = "auto"
) -> Tensor:
    """1 - GIoU with torchvision.ops.generalized_box_iou_loss's arguments, values and gradients.

    Unlike the metric it adds `eps` to both denominators, so that degenerate boxes give numbers, and does not clamp the
    enclosing box's extents.

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
    if reduction not in ("none", "mean", "sum"):  # begins as torchvision's message does, whose tests look for it
        raise UsageError(f"Invalid reduction {reduction!r}; known: none, mean, sum")


def _giou(preds: Tensor, targets: Tensor, eps: float | None, backend: str) -> Tensor:
    """eps None: the metric, extents clamped at 0. A number: the loss's form, added to the denominators."""
    if preds.shape != targets.shape or preds.ndim == 0 or preds.shape[-1] != 4:
        raise UsageError(
            "preds and targets must be boxes of one shape (..., 4); "
            f"got {tuple(preds.shape)} and {tuple(targets.shape)}; .expand() what is to be broadcast"
        )
    if preds.device != targets.device:
        raise UsageError(f"preds are on {preds.device}, targets on {targets.device}; move them to one device")
    preds, targets = (x if x.dtype.is_floating_point else x.float() for x in (preds, targets))
    if preds.dtype != targets.dtype or preds.dtype.itemsize < 2:
        raise UsageError(
            f"preds are {preds.dtype}, targets {targets.dtype}; give both as one of bfloat16, float16, float32, float64"
        )
    module = BACKENDS.pick(backend, preds.device, preds, targets, eps)
    return module.run(preds, targets, eps)
