"""Operations with swappable implementations: one folder each, with a contract, a reference and a file per backend.

Every op takes `backend`: "auto" (the fastest one that takes the call here) or a name, which runs or raises.
Backends are imported when they are first asked for; this imports torch alone.
"""

# One line per op. Not lazy: a folder has its function's name, and importing the folder would hide the function.
from vitkernels.ops.cross_entropy import cross_entropy
from vitkernels.ops.generalized_box_iou import GeneralizedBoxIoULoss, generalized_box_iou, generalized_box_iou_loss
from vitkernels.ops.int8_matmul import int8_matmul
from vitkernels.ops.layer_norm_residual import layer_norm_residual
from vitkernels.ops.linear import linear
from vitkernels.ops.linear_gelu import linear_gelu
from vitkernels.ops.mlp import mlp
from vitkernels.ops.paged_attention import paged_attention
from vitkernels.ops.patch_embed import patch_embed
from vitkernels.ops.quantized_matmul import quantized_matmul

__all__ = [
    "GeneralizedBoxIoULoss",
    "cross_entropy",
    "generalized_box_iou",
    "generalized_box_iou_loss",
    "int8_matmul",
    "layer_norm_residual",
    "linear",
    "linear_gelu",
    "mlp",
    "paged_attention",
    "patch_embed",
    "quantized_matmul",
]
