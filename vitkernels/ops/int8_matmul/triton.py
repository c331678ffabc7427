"""The Triton backend, for NVIDIA GPUs and, interpreted, for any CPU."""

import torch
from torch import Tensor

from vitkernels.bridge.operator import operator
from vitkernels.ops.int8_matmul.triton_product import product


@operator("int8_matmul(Tensor x, Tensor w) -> Tensor")
def _int8_matmul(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w, torch.int32)


@torch.library.register_fake("vitkernels::int8_matmul")
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.int32)


def unsupported(x_MK: Tensor, w_KN: Tensor) -> str | None:
    if x_MK.device.type not in ("cuda", "cpu"):
        return f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {x_MK.device.type}"
    return None


def run(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    return _int8_matmul(x_MK, w_KN)
