"""The Pallas backend for TPU, interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.ops.linear_gelu.pallas_tpu_kernel import linear_gelu, linear_gelu_vjp
from vitkernels.ops.refusals import if_empty, unless_dtypes, unless_tpu_device

_linear_gelu = pallas_op(linear_gelu, vjp=linear_gelu_vjp, name="linear_gelu_tpu")

_DTYPES = (torch.float32, torch.bfloat16)
_LARGEST_ROW = 16384  # bytes: a block has at least 128 rows of the weight, all in VMEM


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    reason = unless_tpu_device("x", x) or unless_dtypes((x.dtype,), _DTYPES) or if_empty(x, weight_NK)
    if reason is not None:
        return reason
    row = weight_NK.shape[1] * x.element_size()
    if row > _LARGEST_ROW:
        return f"blocks hold rows of at most {_LARGEST_ROW} bytes, got {row}. Use backend='reference'"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    N, K = weight_NK.shape
    bias_N = x.new_zeros(N) if bias_N is None else bias_N
    act_MN, _ = _linear_gelu(x.reshape(-1, K).contiguous(), weight_NK.contiguous(), bias_N.contiguous(), tanh=tanh)
    return act_MN.view(*x.shape[:-1], N)
