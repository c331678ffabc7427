"""LayerNorm and GELU in the kernels of the MLP's products, in Pallas for TPU; interpreted on the CPU.

Four of the six products of forward and backward pass hide other work: LayerNorm and GELU in the first, GELU's
gradient and LayerNorm's in two of the backward pass. The others, the second product and the two weight gradients, are
computed by XLA.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.layer_norm_residual import pallas_tpu as norms
from vitkernels.ops.layer_norm_residual.pallas_tpu import Norm, NormSettings, as_inputs
from vitkernels.ops.mlp.pallas_tpu import HiddenGradients
from vitkernels.ops.norm_mlp import reference
from vitkernels.ops.tpu_arrays import Factor, shared, tokens


def unsupported(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype, eight_bit=None) -> str | None:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    reason = norms.unsupported(x, branch, norm_weight, norm_bias, *settings)
    weights = weight1, weight2
    return reason or tpu_arrays.unsupported("x", x, (out_dtype,), *weights, dtype=out_dtype, eight_bit=eight_bit)


def run(norm, weight1, bias1, weight2, eps, tanh: bool, keep: bool, out_dtype, eight_bit=None) -> tuple[Tensor, Tensor]:
    x, branch = norm[:2]
    if not all(t.numel() for t in (x, weight1, weight2)):
        return reference.run(norm, weight1, bias1, weight2, eps, tanh, keep, out_dtype, eight_bit)
    settings = NormSettings(float(eps), out_dtype, eight_bit is not None)
    total, y = _NormMlp.apply(*norm, weight1, bias1, weight2, settings, tanh, keep)
    return x if branch is None else total, y


class _NormMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *operands, weight1, bias1, weight2, settings, tanh, keep = inputs
        norm = Norm(*operands)
        factor1, factor2 = (Factor.of(w, norm.x, settings.out_dtype, settings.eight_bit) for w in (weight1, weight2))
        extra = {**factor1.forward, "bias": shared(bias1)}
        total, act, saved = norm.forward(settings, extra, gelu="tanh" if tanh else "none", keep=keep)
        factors = *factor1.kept(), *factor2.kept()
        # The sum is not saved: whoever computed x has saved it, and the branch is smaller than the sum.
        ctx.save_for_backward(norm.x, *factors, act if keep else None, saved, *norm.kept(with_branch=True))
        ctx.settings, ctx.tanh, ctx.shape, ctx.features = settings, tanh, norm.x.shape, len(weight2)
        ctx.branch_dtype = None if norm.branch is None else norm.branch.dtype
        ctx.dtypes = [None if p is None else p.dtype for p in (weight1, bias1, weight2)]
        ctx.set_materialize_grads(False)
        y = factor2.multiply(act)
        return (None if norm.branch is None else total.view(ctx.shape)), y.view(*ctx.shape[:-1], len(weight2))

    @staticmethod
    @differentiable_once("norm_mlp by pallas_tpu")
    def backward(ctx, dtotal, dy):
        x, weight1, scale1, weight2, scale2, act, saved, *kept = ctx.saved_tensors
        eps, out_dtype, eight_bit = ctx.settings.eps, ctx.settings.out_dtype, ctx.settings.eight_bit
        dy = saved.new_zeros(*saved.shape[:2], ctx.features, dtype=out_dtype) if dy is None else dy
        dy = dy.reshape(*saved.shape[:2], ctx.features).contiguous()
        hidden = HiddenGradients(dy, Factor.from_kept((weight2, scale2)), act, saved, ctx.tanh)
        incoming = {"dy": hidden.dpre, **Factor.from_kept((weight1, scale1)).backward}
        norm = Norm(x, *kept)
        total = tokens(x) if norm.branch is None else None
        gradients, (dbias1, normed) = norm.backward(total, dtotal, incoming, eps, ctx.branch_dtype)
        needs_dweight1, needs_dbias1, needs_dweight2 = ctx.needs_input_grad[7:10]
        dtype1, bias_dtype1, dtype2 = ctx.dtypes
        return (
            *as_inputs(gradients, ctx.shape),
            tpu_arrays.weight_gradient(hidden.dpre, normed, dtype1, eight_bit) if needs_dweight1 else None,
            dbias1.to(bias_dtype1) if needs_dbias1 else None,
            hidden.weight2(dtype2) if needs_dweight2 else None,
            None,
            None,
            None,
        )
