"""The Triton backend for NVIDIA GPUs, interpreted on the CPU."""

from torch import Tensor

from vitkernels.ops.generalized_box_iou.triton_op import giou
from vitkernels.ops.refusals import unless_triton_device


def unsupported(preds: Tensor, targets: Tensor, eps: float | None) -> str | None:
    return unless_triton_device("preds", preds)


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    return giou(preds, targets, eps)
