"""The library's products; the weight's gradient in float32 at once, the bias' in one pass over what it sums.

Shape suffixes: M rows (tokens), K input features, N output features.
"""

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake
from torch.nn import functional as F

from vitkernels.bridge.operator import differentiable_once, operator
from vitkernels.ops.linear.gradients import column_sums, weight_gradient

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unsupported(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> str | None:
    if x.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs; x is on {x.device}"
    if x.dtype not in _FLOATS:
        return f"it calculates in float32; {x.dtype} would lose digits. Use backend='reference'"
    return None


def run(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None, is_qkv: bool) -> Tensor:
    return linear(x, weight_NK, weight_NK.detach().to(x.dtype), bias_N, is_qkv)


@operator("linear(Tensor x, Tensor weight, Tensor rounded, Tensor? bias, bool is_qkv) -> Tensor")
def linear(x: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, is_qkv: bool) -> Tensor:
    """x roundedᵀ + bias. `rounded` is the weight in x's dtype, and no gradient goes there: autograd would want it in
    that dtype. It goes to `weight`."""
    return F.linear(x, rounded, None if bias is None else bias.to(x.dtype))


@register_fake("vitkernels::linear")
def _(x, weight, rounded, bias, is_qkv):
    return x.new_empty(*x.shape[:-1], len(weight))


def _save(ctx, inputs, output):
    x, weight, rounded, bias, ctx.is_qkv = inputs
    ctx.save_for_backward(x, rounded)
    ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype


@differentiable_once("linear by kernels")
def _differentiate(ctx, dy):
    x, rounded = ctx.saved_tensors
    needs_dx, needs_dweight, _, needs_dbias, _ = ctx.needs_input_grad
    N, K = rounded.shape
    dy_MN = dy.reshape(-1, N)
    dx = (dy_MN @ rounded).view(x.shape) if needs_dx else None
    dweight = weight_gradient(dy_MN, x.reshape(-1, K), ctx.weight_dtype) if needs_dweight else None
    dbias = _bias_gradient(dy_MN, ctx.is_qkv).to(ctx.bias_dtype) if needs_dbias else None
    return dx, dweight, None, dbias, None


def _bias_gradient(dy_MN: Tensor, is_qkv: bool) -> Tensor:
    if not is_qkv:
        return column_sums(dy_MN)
    queries, values = column_sums(dy_MN.unflatten(1, (3, -1))[:, ::2])
    return torch.cat([queries, torch.zeros_like(queries), values])


register_autograd("vitkernels::linear", _differentiate, setup_context=_save)
