"""The MLP as one PyTorch operator, opaque to torch.compile; its backward's plain products are left to the compiler.

Shape suffixes: M rows (tokens), K input features, N hidden features, O output features.
"""

from types import ModuleType

import torch
from torch import Tensor
from torch.library import register_autograd, register_fake
from torch.nn import functional as F

from vitkernels.bridge.operator import differentiable_once, operator
from vitkernels.ops.linear_gelu.operators import column_sums, linear_gelu, linear_into_gelu_backward


def unsupported_second(first_layer: ModuleType, x: Tensor, weight2_ON: Tensor, tanh: bool) -> str | None:
    """The second weight takes part in the product that is fused in the backward pass, so it must suit it too."""
    return first_layer.unsupported(x, weight2_ON.mT, None, tanh)


@operator(
    "mlp(Tensor x, Tensor weight1, Tensor? bias1, Tensor weight2, Tensor? bias2, bool tanh, bool keep, str form)"
    " -> (Tensor, Tensor, Tensor)"
)
def mlp(x, weight1, bias1, weight2, bias2, tanh: bool, keep: bool, form: str):
    """The output, and for the backward pass what GELU was given; or with `keep` its slope there, and what it gave."""
    act, saved = linear_gelu(x, weight1, bias1, tanh, keep, form)
    return F.linear(act, weight2, None if bias2 is None else bias2.to(x.dtype)), saved, act if keep else x.new_empty(0)


@register_fake("vitkernels::mlp")
def _(x, weight1, bias1, weight2, bias2, tanh, keep, form):
    saved = x.new_empty(*x.shape[:-1], weight1.shape[0])
    return x.new_empty(*x.shape[:-1], weight2.shape[0]), saved, torch.empty_like(saved) if keep else x.new_empty(0)


def _save(ctx, inputs, output):
    x, weight1, bias1, weight2, bias2, ctx.tanh, ctx.keep, ctx.form = inputs
    ctx.save_for_backward(x, weight1, weight2, *output[1:])
    ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in (bias1, bias2)]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@differentiable_once("mlp by kernels")
def _differentiate(ctx, dy, _dsaved, _dact):
    if dy is None:
        return (None,) * 8
    x, weight1, weight2, saved, act = ctx.saved_tensors
    needs_dx, needs_dweight1, _, needs_dweight2, *_ = ctx.needs_input_grad
    (N, K), O = weight1.shape, len(weight2)
    dy_MO = dy.reshape(-1, O)
    dpre_MN, again_MN, dbias1 = linear_into_gelu_backward(
        dy_MO, weight2, saved.view(-1, N), ctx.tanh, ctx.keep, ctx.form
    )
    act_MN = act.view(-1, N) if ctx.keep else again_MN
    dweight2 = dy_MO.mT @ act_MN if needs_dweight2 else None
    del act_MN, again_MN  # as large as anything here
    dweight1 = dpre_MN.mT @ x.reshape(-1, K) if needs_dweight1 else None
    dx = (dpre_MN @ weight1).view(x.shape) if needs_dx else None
    dtype1, dtype2 = ctx.bias_dtypes
    dbias1 = None if dtype1 is None else dbias1.to(dtype1)
    dbias2 = None if dtype2 is None else column_sums(dy_MO).to(dtype2)
    return dx, dweight1, dbias1, dweight2, dbias2, None, None, None


register_autograd("vitkernels::mlp", _differentiate, setup_context=_save)
