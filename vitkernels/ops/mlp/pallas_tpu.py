"""GELU and its gradient in the epilogue of Pallas products for TPU; the other products by XLA."""

from typing import Any

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.linear_gelu.pallas_tpu import forward as linear_gelu
from vitkernels.ops.linear_gelu.pallas_tpu import gelu_backward
from vitkernels.ops.mlp import reference
from vitkernels.ops.tpu_arrays import Factor


def unsupported(x: Tensor, weight1, bias1, weight2, bias2, tanh: bool, keep: bool) -> str | None:
    return tpu_arrays.unsupported("x", x, (x.dtype,), weight1, weight2)


def run(x: Tensor, weight1, bias1, weight2, bias2, tanh: bool, keep: bool) -> Tensor:
    if not all(t.numel() for t in (x, weight1, weight2)):
        return reference.run(x, weight1, bias1, weight2, bias2, tanh, keep)
    return _Mlp.apply(x, weight1, bias1, weight2, bias2, tanh, keep)


class HiddenGradients:
    """The gradients of y = gelu(pre) weight2ᵀ + bias2, up to the pre-activation.

    Args:
        dy: (B, N, O). factor2: of weight2 (O, F). act, saved: gelu(pre) and gelu'(pre), or None and pre.
    """

    def __init__(self, dy: Tensor, factor2: Factor, act: Tensor | None, saved: Tensor, tanh: bool):
        weight, *scale = factor2.backward.values()
        self._eight_bit = bool(scale)
        found: Any = gelu_backward(dy, weight, saved, *scale, tanh=tanh, kept=act is not None)
        self.dpre: Tensor = found if isinstance(found, Tensor) else found[0]
        self._act: Tensor = found[1] if act is None else act
        self._dy = dy

    def weight2(self, dtype: torch.dtype) -> Tensor:
        return tpu_arrays.weight_gradient(self._dy, self._act, dtype, self._eight_bit)

    def bias2(self, dtype: torch.dtype) -> Tensor:
        return tpu_arrays.column_sums(self._dy).to(dtype)


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight1, bias1, weight2, bias2, tanh: bool, keep: bool):
        rows = tpu_arrays.tokens(x) if x.ndim > 1 else x[None, None]
        factor1, factor2 = (Factor.of(w, rows, x.dtype, False) for w in (weight1, weight2))
        act, saved = linear_gelu(rows, factor1.forward["weight"][0], bias1, tanh, keep)
        ctx.save_for_backward(rows, *factor1.kept(), *factor2.kept(), act if keep else None, saved)
        ctx.dtypes = [None if p is None else p.dtype for p in (weight1, bias1, weight2, bias2)]
        ctx.tanh, ctx.shape, ctx.features = tanh, x.shape, len(weight2)
        return factor2.multiply(act, bias2).view(*x.shape[:-1], len(weight2))

    @staticmethod
    @differentiable_once("mlp by pallas_tpu")
    def backward(ctx, dy):
        rows, *kept1, weight2, scale2, act, saved = ctx.saved_tensors
        needs = ctx.needs_input_grad
        dtype1, bias_dtype1, dtype2, bias_dtype2 = ctx.dtypes
        dy = dy.reshape(*rows.shape[:-1], ctx.features).contiguous()
        hidden = HiddenGradients(dy, Factor.from_kept((weight2, scale2)), act, saved, ctx.tanh)
        return (
            Factor.from_kept(kept1).multiply_gradient(hidden.dpre).view(ctx.shape) if needs[0] else None,
            tpu_arrays.weight_gradient(hidden.dpre, rows, dtype1) if needs[1] else None,
            tpu_arrays.column_sums(hidden.dpre).to(bias_dtype1) if needs[2] else None,
            hidden.weight2(dtype2) if needs[3] else None,
            hidden.bias2(bias_dtype2) if needs[4] else None,
            None,
            None,
        )
