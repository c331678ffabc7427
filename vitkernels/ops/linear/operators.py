"""The linear layer as a PyTorch operator, opaque to torch.compile.

The backward pass uses the library's products, with the weight's gradient directly in float32, and sums the bias'
gradient in one pass. `form` selects the forward product by the name of the backend: "triton" (the library's) or
"pallas_hopper".

Shape suffixes: M rows (tokens), K input features, N output features.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.hopper import can_compile_for
from vitkernels.bridge.operator import differentiable_once, operator
from vitkernels.ops.linear.gradients import column_sums, weight_gradient


@operator("linear(Tensor x, Tensor weight, Tensor rounded, Tensor? bias, bool is_qkv, str form) -> Tensor")
def linear(x: Tensor, weight: Tensor, rounded: Tensor, bias: Tensor | None, is_qkv: bool, form: str) -> Tensor:
    """Return x roundedᵀ + bias, where `rounded` is the weight in x's dtype.

    The gradient goes to `weight`; through `rounded`, autograd would round it to x's dtype.
    """
    if form == "pallas_hopper":
        from vitkernels.ops.linear import pallas_hopper_launch  # needs a newer JAX than the rest of the package

        y_MN = pallas_hopper_launch.linear(x.reshape(-1, x.shape[-1]), rounded, bias)
        return y_MN.view(*x.shape[:-1], y_MN.shape[1])
    return F.linear(x, rounded, None if bias is None else bias.to(x.dtype))


@linear.register_fake
def _(x, weight, rounded, bias, is_qkv, form):
    if form == "pallas_hopper" and can_compile_for(x, rounded):
        from vitkernels.ops.linear import pallas_hopper_launch

        pallas_hopper_launch.start(x, rounded, bias)
    return x.new_empty(*x.shape[:-1], len(weight))


def _save(ctx, inputs, output):
    x, weight, rounded, bias, ctx.is_qkv, _ = inputs
    ctx.save_for_backward(x, rounded)
    ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype


@differentiable_once("linear by kernels")
def _differentiate(ctx, dy):
    x, rounded = ctx.saved_tensors
    needs_dx, needs_dweight, _, needs_dbias, *_ = ctx.needs_input_grad
    N, K = rounded.shape
    dy_MN = dy.reshape(-1, N)
    dx = (dy_MN @ rounded).view(x.shape) if needs_dx else None
    dweight = weight_gradient(dy_MN, x.reshape(-1, K), ctx.weight_dtype) if needs_dweight else None
    dbias = _bias_gradient(dy_MN, ctx.is_qkv).to(ctx.bias_dtype) if needs_dbias else None
    return dx, dweight, None, dbias, None, None


def _bias_gradient(dy_MN: Tensor, is_qkv: bool) -> Tensor:
    if not is_qkv:
        return column_sums(dy_MN)
    queries, values = column_sums(dy_MN.unflatten(1, (3, -1))[:, ::2])
    return torch.cat([queries, torch.zeros_like(queries), values])


linear.register_autograd(_differentiate, setup_context=_save)
