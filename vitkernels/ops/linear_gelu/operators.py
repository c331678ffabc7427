"""The linear layer with GELU as PyTorch operators, opaque to torch.compile. The MLP's backward pass uses them too.

`form` selects the kernels by the name of a backend: "passes", "triton" or "pallas_hopper".

Shape suffixes: M rows (tokens), K input features, N output features.
"""

import torch
from torch import Tensor

from vitkernels.bridge.hopper import can_compile_for
from vitkernels.bridge.operator import differentiable_once, interpretable, operator
from vitkernels.ops.linear_gelu import launch


@operator("linear_gelu(Tensor x, Tensor weight, Tensor? bias, bool tanh, bool keep, str form) -> (Tensor, Tensor)")
def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, tanh: bool, keep: bool, form: str):
    """Return gelu(pre) with pre = x weightᵀ + bias, and for the backward pass pre, or gelu'(pre) if keep.

    keep: the caller keeps gelu(pre), and needs only the slope; both together cost little more than one of them.
    """
    x_MK, weight_NK = (interpretable(t).contiguous() for t in (x.reshape(-1, x.shape[-1]), weight))
    bias_N = None if bias is None else interpretable(bias).contiguous()
    act_MN, saved_MN = launch.forward(x_MK, weight_NK, bias_N, tanh, keep, form)
    shape = *x.shape[:-1], weight.shape[0]
    return act_MN.to(x.dtype).view(shape), saved_MN.to(x.dtype).view(shape)


@linear_gelu.register_fake
def _(x, weight, bias, tanh, keep, form):
    if form == "pallas_hopper" and can_compile_for(x, weight):
        from vitkernels.ops.linear_gelu import pallas_hopper_launch

        pallas_hopper_launch.start(x, weight, bias, tanh, keep)
    act = x.new_empty(*x.shape[:-1], weight.shape[0])
    return act, torch.empty_like(act)


@operator("gelu_backward_with_sums(Tensor dact, Tensor pre, bool tanh) -> (Tensor, Tensor)")
def gelu_backward_with_sums(dact: Tensor, pre: Tensor, tanh: bool) -> tuple[Tensor, Tensor]:
    """Return dpre = dact gelu'(pre), (M, N), and its float32 sums over rows (N)."""
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
    """Differentiate y = gelu(pre) weightᵀ.

    Args:
        dy: (M, K).
        weight: (K, N).
        saved: (M, N), linear_gelu's second result.
        kept: whether the caller kept gelu(pre), so that `saved` is gelu'(pre).

    Returns:
        dpre (M, N), gelu(pre) recomputed (empty if kept), and dpre's float32 sums over rows (N).
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
    assert not keep, "callers that keep the activation, such as the MLP, have their own backward pass"
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
