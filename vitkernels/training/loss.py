"""The training loss of a batch that may contain rows without a sample."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from timm.loss import BinaryCrossEntropy
from torch import Tensor
from torch.nn import functional as F

from vitkernels.ops import cross_entropy
from vitkernels.registry.op import op_of

Loss = Callable[[Tensor, Tensor], Tensor]


def build_loss(backend: str = "eager", label_smoothing: float = 0.0, targets: str = "classes") -> Loss:
    """Return loss(logits, targets), the mean cross-entropy of a batch; 0 for a batch without samples.

    Args:
        targets: kind of the data set's targets, as in Data.targets; with "distributions", rows without a sample are
            -100.
        backend: "eager" (torch's), "auto", "fused" for the kernel of the logits' device, or a backend of
            vitkernels.ops.cross_entropy; others raise UsageError.
        label_smoothing: share of each target that is spread evenly over all classes.

    The loss takes logits (B, C), float32, and class numbers (B,) or class distributions (B, C). Rows without a sample
    have the class number -100, or a distribution of zeros. Smoothing keeps
    these zeros, so padding adds nothing to the loss.
    """
    if backend not in ("eager", "auto", "fused"):
        op_of(cross_entropy).get(backend)
    entropy = F.cross_entropy if backend == "eager" else partial(_cross_entropy, backend=backend)

    has_negative_rows = targets == "distributions"

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            if has_negative_rows:
                targets = targets.clamp(min=0)
            if label_smoothing:
                even = targets.sum(1, keepdim=True) / targets.shape[1]
                targets = torch.lerp(targets, even.expand_as(targets), label_smoothing)
            return entropy(logits, targets)
        mean = entropy(logits, targets, label_smoothing=label_smoothing)
        return torch.where((targets >= 0).any(), mean, 0.0)  # the mean over no samples is NaN

    return loss


def build_bce(label_smoothing: float = 0.0, threshold: float | None = None, targets: str = "classes") -> Loss:
    """Return loss(logits, targets), the mean binary cross-entropy over classes and images with a sample, else 0.

    It is timm.loss.BinaryCrossEntropy without the rows that hold no sample. Wightman et al., "ResNet strikes back",
    arXiv:2110.00476, train single labels with it; with several labels for an image it is the usual loss.

    Args:
        label_smoothing: as in timm, of class numbers alone: other targets are not smoothed.
        threshold: targets above it count as 1, others as 0; None leaves them.
        targets: kind of the data set's targets, as in Data.targets. In a row without a sample, mixed class numbers are
            zeros, other targets -100.
    """
    of_all = BinaryCrossEntropy(smoothing=label_smoothing, target_threshold=threshold, reduction="none")

    def loss(logits: Tensor, batch: Tensor) -> Tensor:
        first = batch if batch.dim() == 1 else batch[:, 0]
        present = batch.sum(1) > 0 if batch.dim() == 2 and targets == "classes" else first >= 0
        each = of_all(logits, batch.clamp(min=0)).mean(1)
        return (each * present).sum() / present.sum().clamp(min=1)

    return loss


def _cross_entropy(logits: Tensor, targets: Tensor, backend: str, **settings: Any) -> Tensor:
    if backend == "fused":
        backend = op_of(cross_entropy).kernel(logits.device.type)
    return cross_entropy(logits, targets, **settings, backend=backend)
