"""The training loss of a batch that may contain rows without a sample."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.ops import cross_entropy
from vitkernels.registry.op import op_of

Loss = Callable[[Tensor, Tensor], Tensor]


def build_loss(backend: str = "eager", label_smoothing: float = 0.0) -> Loss:
    """Return loss(logits, targets), the mean cross-entropy of a batch; 0 for a batch without samples.

    Args:
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

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            if label_smoothing:
                even = targets.sum(1, keepdim=True) / targets.shape[1]
                targets = torch.lerp(targets, even.expand_as(targets), label_smoothing)
            return entropy(logits, targets)
        mean = entropy(logits, targets, label_smoothing=label_smoothing)
        return torch.where((targets >= 0).any(), mean, 0.0)  # the mean over no samples is NaN

    return loss


def _cross_entropy(logits: Tensor, targets: Tensor, backend: str, **settings: Any) -> Tensor:
    if backend == "fused":
        backend = op_of(cross_entropy).kernel(logits.device.type)
    return cross_entropy(logits, targets, **settings, backend=backend)
