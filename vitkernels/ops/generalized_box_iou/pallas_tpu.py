"""The Pallas backend, for TPU and, interpreted, for the CPU."""

from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.generalized_box_iou.pallas_tpu_kernel import giou, giou_vjp

_giou = pallas_op(giou, vjp=giou_vjp, name="generalized_box_iou_tpu", shard_batch=True)

_DTYPES = ("torch.float32", "torch.bfloat16")


def unsupported(preds: Tensor, targets: Tensor, eps: float | None) -> str | None:
    if preds.device.type not in ("cpu", "xla"):
        return f"its kernel is for TPU (device xla) and, interpreted, for cpu; got {preds.device.type}"
    if str(preds.dtype) not in _DTYPES:
        return f"it takes float32 and bfloat16, got {preds.dtype}"
    if not preds.numel():
        return "it has no empty calls"
    return None


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    shape = preds.shape[:-1]
    if len(shape) != 2:
        preds, targets = (x.reshape(1, -1, 4) for x in (preds, targets))
    return _giou(preds.contiguous(), targets.contiguous(), eps=eps).reshape(shape)
