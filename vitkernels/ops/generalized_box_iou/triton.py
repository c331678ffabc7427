"""The Triton backend, for NVIDIA GPUs and, interpreted, for any CPU."""

from torch import Tensor

from vitkernels.ops.generalized_box_iou.triton_op import giou


def unsupported(preds: Tensor, targets: Tensor, eps: float | None) -> str | None:
    if preds.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {preds.device.type}"
    return None


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    return giou(preds, targets, eps)
