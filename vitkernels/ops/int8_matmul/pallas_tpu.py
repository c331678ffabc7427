"""The Pallas backend for TPU, interpreted on the CPU."""

from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.int8_matmul.pallas_tpu_kernel import matmul
from vitkernels.ops.refusals import if_empty, unless_tpu_device

_matmul = pallas_op(matmul, name="int8_matmul_tpu")


def unsupported(x_MK: Tensor, w_KN: Tensor) -> str | None:
    return unless_tpu_device("x", x_MK) or if_empty(x_MK, w_KN)


def run(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    if _is_transposed(w_KN):
        return _matmul(x_MK.contiguous(), w_KN.T, transposed=True)
    return _matmul(x_MK.contiguous(), w_KN.contiguous(), transposed=False)


def _is_transposed(w_KN: Tensor) -> bool:
    """Return whether w is stored as (N, K). XLA tensors do not expose strides and count as stored in their shape."""
    return w_KN.device.type == "cpu" and w_KN.T.is_contiguous() and not w_KN.is_contiguous()
