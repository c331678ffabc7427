"""The Pallas backend for TPU, interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.generalized_box_iou.pallas_tpu_kernel import giou, giou_vjp
from vitkernels.ops.refusals import if_empty, unless_dtypes, unless_tpu_device

_giou = pallas_op(giou, vjp=giou_vjp, name="generalized_box_iou_tpu", shard_batch=True)

_DTYPES = (torch.float32, torch.bfloat16)


def unsupported(preds: Tensor, targets: Tensor, eps: float | None) -> str | None:
    return unless_tpu_device("preds", preds) or unless_dtypes((preds.dtype,), _DTYPES) or if_empty(preds)


def run(preds: Tensor, targets: Tensor, eps: float | None) -> Tensor:
    shape = preds.shape[:-1]
    if len(shape) != 2:
        preds, targets = (x.reshape(1, -1, 4) for x in (preds, targets))
    return _giou(preds.contiguous(), targets.contiguous(), eps=eps).reshape(shape)
