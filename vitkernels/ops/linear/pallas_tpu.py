"""Products by XLA on TPU, in float32 where a weight gradient is summed; the same functions in JAX on the CPU.

A single product is XLA's best case: by estimate, it reaches 93 to 97 % of the MXU, as a Pallas kernel does. A kernel is
used if the number of tokens is not a multiple of 8, where XLA's result would be copied.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.linear import reference
from vitkernels.ops.refusals import unless_dtypes, unless_tpu_device


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    return unless_tpu_device("x", x) or unless_dtypes((x.dtype,), tpu_arrays.DTYPES)


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    if not x.numel() or not weight_NK.numel():
        return reference.run(x, weight_NK, bias_N, is_qkv)
    return _Linear.apply(x, weight_NK, bias_N, is_qkv)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, is_qkv: bool):
        rows = _as_tokens(x)
        factor = tpu_arrays.unrounded(weight, rows, x.dtype)
        ctx.save_for_backward(rows, factor)
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.shape, ctx.is_qkv = x.shape, is_qkv
        return tpu_arrays.linear(rows, factor, bias).view(*x.shape[:-1], len(weight))

    @staticmethod
    @differentiable_once("linear by pallas_tpu")
    def backward(ctx, dy):
        rows, factor = ctx.saved_tensors
        dy = dy.reshape(*rows.shape[:-1], len(factor))
        needs_dx, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        dx = tpu_arrays.input_gradient(dy, factor).view(ctx.shape) if needs_dx else None
        dweight = tpu_arrays.weight_gradient(dy, rows, ctx.weight_dtype) if needs_dweight else None
        dbias = None
        if needs_dbias:
            dbias = without_keys(tpu_arrays.column_sums(dy), ctx.is_qkv).to(ctx.bias_dtype)
        return dx, dweight, dbias, None


def _as_tokens(x: Tensor) -> Tensor:
    """Return (..., K) as (B, N, K)."""
    return tpu_arrays.tokens(x) if x.ndim > 1 else x[None, None]


def without_keys(dbias_N: Tensor, is_qkv: bool) -> Tensor:
    """Return a bias gradient with zeros for the keys, whose bias softmax ignores."""
    if not is_qkv:
        return dbias_N
    queries, keys, values = dbias_N.chunk(3)
    return torch.cat([queries, torch.zeros_like(keys), values])
