"""The Pallas backend, for TPU and, interpreted, for the CPU."""

from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.int8_matmul.pallas_tpu_kernel import matmul

_matmul = pallas_op(matmul, name="int8_matmul_tpu")


def unsupported(x_MK: Tensor, w_KN: Tensor) -> str | None:
    if x_MK.device.type not in ("cpu", "xla"):
        return f"its kernel is for TPU (device xla) and, interpreted, for cpu; got {x_MK.device.type}"
    if 0 in (*x_MK.shape, *w_KN.shape):
        return "it has no empty calls"
    return None


def run(x_MK: Tensor, w_KN: Tensor) -> Tensor:
    if _is_transposed(w_KN):
        return _matmul(x_MK.contiguous(), w_KN.T, transposed=True)
    return _matmul(x_MK.contiguous(), w_KN.contiguous(), transposed=False)


def _is_transposed(w_KN: Tensor) -> bool:
    """Whether w lies in memory as (N, K). XLA tensors do not tell: theirs are what they say they are."""
    return w_KN.device.type == "cpu" and w_KN.T.is_contiguous() and not w_KN.is_contiguous()
