"""LayerNorm in the kernels of the matrix products before and after it, in Pallas for TPU; interpreted on the CPU."""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.layer_norm_residual import pallas_tpu as norms
from vitkernels.ops.layer_norm_residual.pallas_tpu import Norm, NormSettings, as_inputs
from vitkernels.ops.linear.pallas_tpu import without_keys
from vitkernels.ops.norm_linear import reference
from vitkernels.ops.tpu_arrays import Factor, shared


def unsupported(norm, weight_FC, bias_F, eps, is_qkv, out_dtype, eight_bit=None) -> str | None:
    x, branch, norm_weight, norm_bias, branch_bias, layer_scale, sample_scale = norm
    settings = (eps, branch_bias, layer_scale, sample_scale, out_dtype)
    reason = norms.unsupported(x, branch, norm_weight, norm_bias, *settings)
    return reason or tpu_arrays.unsupported("x", x, (out_dtype,), weight_FC, dtype=out_dtype, eight_bit=eight_bit)


def run(norm, weight_FC, bias_F, eps, is_qkv, out_dtype, eight_bit=None) -> tuple[Tensor, Tensor]:
    x, branch = norm[:2]
    if not x.numel() or not weight_FC.numel():
        return reference.run(norm, weight_FC, bias_F, eps, is_qkv, out_dtype, eight_bit)
    settings = NormSettings(float(eps), out_dtype, eight_bit is not None)
    total, y = _NormLinear.apply(*norm, weight_FC, bias_F, settings, is_qkv)
    return x if branch is None else total, y


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *operands, weight, bias, settings, is_qkv = inputs
        norm = Norm(*operands)
        factor = Factor.of(weight, norm.x, settings.out_dtype, settings.eight_bit)
        total, y = norm.forward(settings, {**factor.forward, "bias": shared(bias)})
        ctx.save_for_backward(total, *factor.kept(), *norm.kept())
        ctx.settings, ctx.is_qkv, ctx.shape, ctx.features = settings, is_qkv, norm.x.shape, len(weight)
        ctx.branch_dtype = None if norm.branch is None else norm.branch.dtype
        ctx.weight_dtype, ctx.bias_dtype = weight.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return (None if norm.branch is None else total.view(ctx.shape)), y.view(*ctx.shape[:-1], len(weight))

    @staticmethod
    @differentiable_once("norm_linear by pallas_tpu")
    def backward(ctx, dtotal, dy):
        total, weight, scale, *kept = ctx.saved_tensors
        eps, out_dtype, eight_bit = ctx.settings.eps, ctx.settings.out_dtype, ctx.settings.eight_bit
        dy = total.new_zeros(*total.shape[:2], ctx.features, dtype=out_dtype) if dy is None else dy
        dy = dy.reshape(*total.shape[:2], ctx.features).contiguous()
        incoming = {"dy": dy, **Factor.from_kept((weight, scale)).backward}
        norm = Norm(total, *kept)
        gradients, (dbias, normed) = norm.backward(total, dtotal, incoming, eps, ctx.branch_dtype)
        needs_dweight, needs_dbias = ctx.needs_input_grad[7:9]
        return (
            *as_inputs(gradients, ctx.shape),
            tpu_arrays.weight_gradient(dy, normed, ctx.weight_dtype, eight_bit) if needs_dweight else None,
            without_keys(dbias, ctx.is_qkv).to(ctx.bias_dtype) if needs_dbias else None,
            None,
            None,
        )
