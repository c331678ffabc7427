"""The loss of a batch in which rows may be no sample."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.ops import cross_entropy
from vitkernels.registry.op import backends_of


def mean_loss(backend: str, label_smoothing: float = 0.0) -> Callable[[Tensor, Tensor], Tensor]:
    """loss(logits, targets): cross-entropy's mean over a batch; a batch without any sample costs 0.

    backend: "eager" (torch's), "auto" or one of cross_entropy's; others raise UsageError.
    label_smoothing: the share of each target that is spread over all classes.

    The loss takes logits (B, C), float32, and class numbers (B,) or distributions (B, C). Rows that are no sample have
    the number -100, or a distribution of zeros, which has no share to spread: a smoothed one would train the model.
    """
    if backend not in ("eager", "auto"):
        backends_of(cross_entropy).get(backend)
    entropy = F.cross_entropy if backend == "eager" else partial(cross_entropy, backend=backend)

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            if label_smoothing:
                even = targets.sum(1, keepdim=True) / targets.shape[1]
                targets = torch.lerp(targets, even.expand_as(targets), label_smoothing)
            return entropy(logits, targets)
        mean = entropy(logits, targets, label_smoothing=label_smoothing)
        return torch.where((targets >= 0).any(), mean, 0.0)  # over nothing it is no number

    return loss
