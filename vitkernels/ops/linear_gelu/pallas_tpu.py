"""GELU and its gradient in the epilogue of Pallas products for TPU; interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.linear_gelu import pallas_tpu_kernel as kernel
from vitkernels.ops.linear_gelu import reference
from vitkernels.ops.tpu_arrays import shared

_forward = pallas_op(kernel.linear_gelu_of_images, name="linear_gelu_tpu", shard_batch=True)
_slopes = pallas_op(kernel.times_slope, name="times_gelu_slope_tpu")
gelu_backward = pallas_op(kernel.gelu_backward, name="linear_into_gelu_tpu", shard_batch=True)


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> str | None:
    return tpu_arrays.unsupported("x", x, (x.dtype,), weight_NK)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, tanh: bool) -> Tensor:
    if not x.numel() or not weight_NK.numel():
        return reference.run(x, weight_NK, bias_N, tanh)
    return _LinearGelu.apply(x, weight_NK, bias_N, tanh)


def forward(x_BNK: Tensor, rounded: Tensor, bias: Tensor | None, tanh: bool, keep: bool) -> tuple[Tensor, ...]:
    """Return gelu(pre) and what `gelu_backward` needs: pre, or with keep gelu'(pre); both (B, N, F)."""
    arrays = {"x": x_BNK, "weight": shared(rounded), "bias": shared(bias)}
    return tpu_arrays.run(_forward, arrays, tanh=tanh, keep=keep)


class _LinearGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, tanh: bool):
        rows = tpu_arrays.tokens(x) if x.ndim > 1 else x[None, None]
        act, pre = forward(rows, weight, bias, tanh, keep=False)
        ctx.save_for_backward(rows, weight, pre)
        ctx.tanh, ctx.shape, ctx.bias_dtype = tanh, x.shape, None if bias is None else bias.dtype
        return act.view(*x.shape[:-1], len(weight))

    @staticmethod
    @differentiable_once("linear_gelu by pallas_tpu")
    def backward(ctx, dact):
        rows, weight, pre = ctx.saved_tensors
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dpre, dbias = _slopes(dact.reshape(pre.shape).contiguous(), pre, tanh=ctx.tanh)
        dx = tpu_arrays.input_gradient(dpre, weight).view(ctx.shape) if needs_dx else None
        dweight = tpu_arrays.weight_gradient(dpre, rows, weight.dtype) if needs_dweight else None
        return dx, dweight, dbias.to(ctx.bias_dtype) if needs_dbias else None, None
