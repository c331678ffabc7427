"""The Triton backend, for NVIDIA GPUs and, interpreted, for any CPU."""

from importlib.util import find_spec

from torch import Tensor

_MISSING = None if find_spec("triton") else "Triton is not installed: pip install 'vitkernels[cuda]' (Linux only)"

if _MISSING is None:
    from vitkernels.ops.generalized_box_iou.triton_op import giou


def unsupported(preds: Tensor, targets: Tensor, eps: float | None) -> str | None:
    if _MISSING is None and preds.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {preds.device.type}"
    return _MISSING


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    return giou(preds, targets, eps)
