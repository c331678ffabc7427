"""Operations with interchangeable backends.

Each op is a folder with a contract (`__init__.py`: the function, its checks and its BACKENDS), `reference.py`, and one
module per backend with `unsupported(...)` and `run(...)`. A new op needs these files and its name below.

Every op takes `backend`: "auto", the fastest backend that supports the call, or a name, which runs or raises. Backends
are imported at their first use; this package imports only torch.
"""

# Import eagerly: an op folder has the name of its function, so importing the folder later would replace the function.
from vitkernels.ops.cross_entropy import cross_entropy
from vitkernels.ops.eight_bit_linear import eight_bit_linear
from vitkernels.ops.generalized_box_iou import GeneralizedBoxIoULoss, generalized_box_iou, generalized_box_iou_loss
from vitkernels.ops.int8_matmul import int8_matmul
from vitkernels.ops.layer_norm_residual import layer_norm_residual
from vitkernels.ops.linear import linear
from vitkernels.ops.linear_gelu import linear_gelu
from vitkernels.ops.mlp import mlp
from vitkernels.ops.norm_linear import norm_linear
from vitkernels.ops.norm_mlp import norm_mlp
from vitkernels.ops.paged_attention import paged_attention
from vitkernels.ops.patch_embed import patch_embed
from vitkernels.ops.quantized_matmul import quantized_matmul
from vitkernels.ops.swiglu_norm import swiglu_norm

__all__ = [
    "GeneralizedBoxIoULoss",
    "cross_entropy",
    "eight_bit_linear",
    "generalized_box_iou",
    "generalized_box_iou_loss",
    "int8_matmul",
    "layer_norm_residual",
    "linear",
    "linear_gelu",
    "mlp",
    "norm_linear",
    "norm_mlp",
    "paged_attention",
    "patch_embed",
    "quantized_matmul",
    "swiglu_norm",
]
