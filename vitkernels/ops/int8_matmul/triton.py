"""The Triton backend for NVIDIA GPUs, interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge.operator import operator
from vitkernels.ops.int8_matmul.triton_product import product
from vitkernels.ops.refusals import unless_triton_device


@operator("int8_matmul(Tensor x, Tensor w) -> Tensor")
def _int8_matmul(x: Tensor, w: Tensor) -> Tensor:
    return product(x, w, torch.int32)


@torch.library.register_fake("vitkernels::int8_matmul")
def _(x, w):
    return x.new_empty(x.shape[0], w.shape[1], dtype=torch.int32)


def unsupported(x_MK: Tensor, w_KN: Tensor) -> str | None:
    return unless_triton_device("x", x_MK)


def run(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    return _int8_matmul(x_MK, w_KN)
