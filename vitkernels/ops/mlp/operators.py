"""The MLP as one PyTorch operator, opaque to torch.compile.

`form` selects the kernels by the name of a linear_gelu backend: "passes", "triton" or "pallas_hopper".

Shape suffixes: M rows (tokens), K input features, N hidden features, O output features.
"""

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.hopper import can_compile_for
from vitkernels.bridge.operator import differentiable_once, operator
from vitkernels.ops.linear.gradients import column_sums, weight_gradient
from vitkernels.ops.linear_gelu.operators import linear_gelu, linear_into_gelu_backward


def backend_functions(first_layer: ModuleType, form: str) -> tuple[Callable, Callable]:
    """Return `unsupported` and `run` of the MLP backend that builds on a backend of linear_gelu."""

    def unsupported(x: Tensor, weight1, bias1, weight2, bias2, tanh: bool, keep: bool) -> str | None:
        # The backward pass fuses GELU's gradient into the product with the second weight, which must fit as well.
        return first_layer.unsupported(x, weight1, bias1, tanh) or first_layer.unsupported(x, weight2.mT, None, tanh)

    def run(x: Tensor, weight1, bias1, weight2, bias2, tanh: bool, keep: bool) -> Tensor:
        rounded1, rounded2 = (weight.detach().to(x.dtype) for weight in (weight1, weight2))
        return mlp(x, weight1, rounded1, bias1, weight2, rounded2, bias2, tanh, keep, form)[0]

    return unsupported, run


@operator(
    "mlp(Tensor x, Tensor weight1, Tensor rounded1, Tensor? bias1, Tensor weight2, Tensor rounded2, Tensor? bias2,"
    " bool tanh, bool keep, str form) -> (Tensor, Tensor, Tensor)"
)
def mlp(x, weight1, rounded1, bias1, weight2, rounded2, bias2, tanh: bool, keep: bool, form: str):
    """Return the output, and for the backward pass the pre-activation, or with `keep` GELU's slope and the activation.

    rounded1, rounded2: the weights in x's dtype. Gradients go to weight1 and weight2; through the rounded weights,
        autograd would round them to x's dtype.
    """
    if form == "pallas_hopper" and x.requires_grad:
        _start(x, rounded1, bias1, rounded2, tanh, keep)
    act, saved = linear_gelu(x, rounded1, bias1, tanh, keep, form)
    y = F.linear(act, rounded2, None if bias2 is None else bias2.to(x.dtype))
    return y, saved, act if keep else x.new_empty(0)


def _start(x: Tensor, rounded1: Tensor, bias1: Tensor | None, rounded2: Tensor, tanh: bool, keep: bool) -> None:
    """Start to compile the Hopper kernels of both passes, before the forward pass waits for its own.

    Call with the tensors of a call or of its trace, so that a model's kernels compile while torch.compile traces it.
    """
    from vitkernels.ops.linear_gelu import pallas_hopper_launch  # needs a newer JAX than the rest of the package

    pallas_hopper_launch.start(x, rounded1, bias1, tanh, keep)
    if x.requires_grad:
        pallas_hopper_launch.start_backward(x, rounded2, tanh, keep)


@mlp.register_fake
def _(x, weight1, rounded1, bias1, weight2, rounded2, bias2, tanh, keep, form):
    if form == "pallas_hopper" and can_compile_for(x, rounded1, rounded2):
        _start(x, rounded1, bias1, rounded2, tanh, keep)
    saved = x.new_empty(*x.shape[:-1], weight1.shape[0])
    return x.new_empty(*x.shape[:-1], weight2.shape[0]), saved, torch.empty_like(saved) if keep else x.new_empty(0)


def _save(ctx, inputs, output):
    x, weight1, rounded1, bias1, weight2, rounded2, bias2, ctx.tanh, ctx.keep, ctx.form = inputs
    ctx.save_for_backward(x, rounded1, rounded2, *output[1:])
    ctx.dtypes = [None if p is None else p.dtype for p in (weight1, bias1, weight2, bias2)]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


@differentiable_once("mlp by kernels")
def _differentiate(ctx, dy, _dsaved, _dact):
    if dy is None:
        return (None,) * 10
    x, rounded1, rounded2, saved, act = ctx.saved_tensors
    needs_dx, needs_dweight1, _, _, needs_dweight2, *_ = ctx.needs_input_grad
    dtype1, bias_dtype1, dtype2, bias_dtype2 = ctx.dtypes
    (N, K), O = rounded1.shape, len(rounded2)
    dy_MO = dy.reshape(-1, O)
    dpre_MN, recomputed_MN, dbias1 = linear_into_gelu_backward(
        dy_MO, rounded2, saved.view(-1, N), ctx.tanh, ctx.keep, ctx.form
    )
    act_MN = act.view(-1, N) if ctx.keep else recomputed_MN
    dweight2 = weight_gradient(dy_MO, act_MN, dtype2) if needs_dweight2 else None
    del act_MN, recomputed_MN  # among the largest tensors of the backward pass
    dweight1 = weight_gradient(dpre_MN, x.reshape(-1, K), dtype1) if needs_dweight1 else None
    dx = (dpre_MN @ rounded1).view(x.shape) if needs_dx else None
    dbias1 = None if bias_dtype1 is None else dbias1.to(bias_dtype1)
    dbias2 = None if bias_dtype2 is None else column_sums(dy_MO).to(bias_dtype2)
    return dx, dweight1, None, dbias1, dweight2, None, dbias2, None, None, None


mlp.register_autograd(_differentiate, setup_context=_save)
