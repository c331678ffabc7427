"""int8 products in Pallas for TPU, which round their operands in VMEM; interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.eight_bit_linear import reference
from vitkernels.ops.tpu_arrays import Factor


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> str | None:
    return tpu_arrays.unsupported("x", x, (x.dtype,), weight_NK, dtype=x.dtype, eight_bit=dtype)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not x.numel() or not weight_NK.numel():
        return reference.run(x, weight_NK, bias_N, dtype)
    return _EightBitLinear.apply(x, weight_NK, bias_N)


class _EightBitLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        rows, factor = tpu_arrays.tokens(x) if x.ndim > 1 else x[None, None], Factor.of(weight, x, x.dtype, True)
        ctx.save_for_backward(rows, *factor.kept())
        ctx.shape, ctx.features, ctx.weight_dtype = x.shape, len(weight), weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        return factor.multiply(rows, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @differentiable_once("eight_bit_linear by pallas_tpu")
    def backward(ctx, dy):
        rows, *kept = ctx.saved_tensors
        dy = dy.reshape(*rows.shape[:-1], ctx.features).contiguous()
        needs_dx, needs_dweight, needs_dbias = ctx.needs_input_grad
        return (
            Factor.from_kept(kept).multiply_gradient(dy).view(ctx.shape) if needs_dx else None,
            tpu_arrays.weight_gradient(dy, rows, ctx.weight_dtype, eight_bit=True) if needs_dweight else None,
            tpu_arrays.column_sums(dy).to(ctx.bias_dtype) if needs_dbias else None,
        )
