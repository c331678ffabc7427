"""The Pallas backend, for TPU and, interpreted, for the CPU."""

from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.linear_gelu.pallas_tpu_kernel import linear_gelu, linear_gelu_vjp

_linear_gelu = pallas_op(linear_gelu, vjp=linear_gelu_vjp, name="linear_gelu_tpu")

_DTYPES = ("torch.float32", "torch.bfloat16")
_LARGEST_ROW = 16384  # bytes, of which 128 must fit beside each other in VMEM


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    if x.device.type not in ("cpu", "xla"):
        return f"its kernel is for TPU (device xla) and, interpreted, for cpu; got {x.device.type}"
    if str(x.dtype) not in _DTYPES:
        return f"it takes float32 and bfloat16, got {x.dtype}. Use backend='reference'"
    if not x.numel() or not weight_NK.numel():
        return "it has no empty calls. Use backend='reference'"
    if weight_NK.shape[1] * x.element_size() > _LARGEST_ROW:
        return f"rows of {weight_NK.shape[1]} numbers are too long for its blocks. Use backend='reference'"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    N, K = weight_NK.shape
    bias_N = x.new_zeros(N) if bias_N is None else bias_N
    act_MN, _ = _linear_gelu(x.reshape(-1, K).contiguous(), weight_NK.contiguous(), bias_N.contiguous(), tanh=tanh)
    return act_MN.view(*x.shape[:-1], N)
