"""LayerNorm and GELU in the kernels of the MLP's products, in Pallas for TPU; interpreted on the CPU.

Four of the six products of forward and backward pass have something to hide: LayerNorm and GELU in the first, GELU's
gradient and LayerNorm's in two of the backward pass. The others, the second product and the two weight gradients, are
XLA's.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.layer_norm_residual import pallas_tpu as norms
from vitkernels.ops.layer_norm_residual.pallas_tpu import Norm, NormSettings, as_inputs
from vitkernels.ops.mlp.pallas_tpu import HiddenGradients
from vitkernels.ops.norm_mlp import reference
from vitkernels.ops.tpu_arrays import shared


def unsupported(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype) -> str | None:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    reason = norms.unsupported(x, branch, norm_weight, norm_bias, *settings)
    return reason or tpu_arrays.unsupported("x", x, (out_dtype,), weight1, weight2, dtype=out_dtype)


def run(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype) -> tuple[Tensor, Tensor]:
    x, branch = norm[:2]
    if not all(t.numel() for t in (x, weight1, weight2)):
        return reference.run(norm, weight1, bias1, weight2, eps, tanh, keep, out_dtype)
    settings = NormSettings(float(eps), out_dtype)
    total, y = _NormMlp.apply(*norm, weight1, bias1, weight2, settings, tanh, keep)
    return x if branch is None else total, y


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *operands, weight1, bias1, weight2, settings, tanh, keep = inputs
        norm, (rounded1, rounded2) = Norm(*operands), [w.to(settings.out_dtype) for w in (weight1, weight2)]
        extra = {"weight": shared(rounded1), "bias": shared(bias1)}
        total, act, saved = norm.forward(settings, extra, gelu="tanh" if tanh else "none", keep=keep)
        ctx.save_for_backward(total, rounded1, rounded2, act if keep else None, saved, *norm.kept())
        ctx.eps, ctx.tanh, ctx.shape = settings.eps, tanh, norm.x.shape
        ctx.branch_dtype = None if norm.branch is None else norm.branch.dtype
        ctx.dtypes = [None if p is None else p.dtype for p in (weight1, bias1, weight2)]
        ctx.set_materialize_grads(False)
        y = tpu_arrays.linear(act, rounded2)
        return (None if norm.branch is None else total.view(ctx.shape)), y.view(*ctx.shape[:-1], len(weight2))

    @staticmethod
    @differentiable_once("norm_mlp by pallas_tpu")
    def backward(ctx, dtotal, dy):
        total, rounded1, rounded2, act, saved, *kept = ctx.saved_tensors
        dy = total.new_zeros(*total.shape[:2], len(rounded2), dtype=rounded2.dtype) if dy is None else dy
        dy = dy.reshape(*total.shape[:2], len(rounded2)).contiguous()
        hidden = HiddenGradients(dy, rounded2, act, saved, ctx.tanh)
        incoming = {"dy": hidden.dpre, "weight": shared(rounded1)}
        norm = Norm(total, *kept)
        gradients, (dbias1, normed) = norm.backward(total, dtotal, incoming, ctx.eps, ctx.branch_dtype)
        needs_dweight1, needs_dbias1, needs_dweight2 = ctx.needs_input_grad[7:10]
        dtype1, bias_dtype1, dtype2 = ctx.dtypes
        return (
            *as_inputs(gradients, ctx.shape),
            tpu_arrays.weight_gradient(hidden.dpre, normed, dtype1) if needs_dweight1 else None,
            dbias1.to(bias_dtype1) if needs_dbias1 else None,
            hidden.weight2(dtype2) if needs_dweight2 else None,
            None,
            None,
            None,
        )
