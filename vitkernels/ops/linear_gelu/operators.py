"""The linear layer with GELU as PyTorch operators, opaque to torch.compile; the MLP's backward builds on them too.

`form` says how: "passes", "triton" or "pallas_hopper", as the backends are named.

Shape suffixes: M rows (tokens), K input features, N output features.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.ops.linear_gelu import launch


@operator("linear_gelu(Tensor x, Tensor weight, Tensor? bias, bool tanh, bool keep, str form) -> (Tensor, Tensor)")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, keep: bool, form: str):
    """gelu(x weightᵀ + bias), and for the backward pass what GELU was given, pre; or, for one who keeps the first
    result, gelu'(pre) instead: both at once take little more work than one of them."""
    x_MK, weight_NK = (interpretable(t).contiguous() for t in (x.reshape(-1, x.shape[-1]), weight))
    bias_N = None if bias is None else interpretable(bias).contiguous()
    act_MN, saved_MN = launch.forward(x_MK, weight_NK, bias_N, tanh, keep, form)
    shape = *x.shape[:-1], weight.shape[0]
    return act_MN.to(x.dtype).view(shape), saved_MN.to(x.dtype).view(shape)


@linear_gelu.register_fake
def _(x, weight, bias, tanh, keep, form):
    act = x.new_empty(*x.shape[:-1], weight.shape[0])
    return act, torch.empty_like(act)


@operator("gelu_backward_with_sums(Tensor dact, Tensor pre, bool tanh) -> (Tensor, Tensor)")
def gelu_backward_with_sums(dact: Tensor, pre: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """dpre = dact gelu'(pre), both (M, N), and dpre's sums over rows (N) in float32."""
    dpre, _, sums = launch.backward_pass(interpretable(dact).contiguous(), interpretable(pre), tanh)
    return dpre.to(pre.dtype), sums


@gelu_backward_with_sums.register_fake
def _(dact, pre, tanh):
    return torch.empty_like(pre), pre.new_empty(pre.shape[1], dtype=torch.float32)


@operator(
    "linear_into_gelu_backward(Tensor dy, Tensor weight, Tensor saved, bool tanh, bool kept, str form)"
    " -> (Tensor, Tensor, Tensor)"
)
def linear_into_gelu_backward(dy: Tensor, weight: Tensor, saved: Tensor, tanh: bool, kept: bool, form: str):
    """Back through y = gelu(pre) weightᵀ: dpre (M, N), gelu(pre) again (empty where it was kept), and dpre's sums
    over rows in float32.

    dy (M, K); weight (K, N); saved (M, N), linear_gelu's second result.
    """
    given = interpretable(dy).contiguous(), interpretable(weight).contiguous(), interpretable(saved)
    dpre, act, sums = launch.backward(*given, tanh, kept, form)
    return dpre.to(saved.dtype), saved.new_empty(0) if act is None else act.to(saved.dtype), sums


@linear_into_gelu_backward.register_fake
def _(dy, weight, saved, tanh, kept, form):
    act = saved.new_empty(0) if kept else torch.empty_like(saved)
    return torch.empty_like(saved), act, saved.new_empty(saved.shape[1], dtype=torch.float32)


def _save(ctx, inputs, output):
    x, weight, bias, ctx.tanh, keep, _ = inputs
    assert not keep, "who keeps the result has a backward pass of its own, as the MLP"
    ctx.save_for_backward(x, weight, output[1])
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


@differentiable_once("linear_gelu by kernels")
def _differentiate(ctx, dact, _dpre):
    if dact is None:
        return (None,) * 6
    x, weight, pre = ctx.saved_tensors
    N, K = weight.shape
    dpre_MN, dbias = gelu_backward_with_sums(dact.reshape(-1, N), pre.view(-1, N), ctx.tanh)
    dx = (dpre_MN @ weight).view(x.shape) if ctx.needs_input_grad[0] else None
    dweight = dpre_MN.mT @ x.reshape(-1, K) if ctx.needs_input_grad[1] else None
    return dx, dweight, None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype), None, None, None


linear_gelu.register_autograd(_differentiate, setup_context=_save)
