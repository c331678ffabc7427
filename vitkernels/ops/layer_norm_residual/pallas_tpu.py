"""One pass over the activations forward, one backward, in Pallas for TPU; interpreted on the CPU.

`Norm` can also fuse the matrix product that follows, as norm_linear and norm_mlp do.

Shape suffixes: B images, N tokens, C channels, F features of the product.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from vitkernels.bridge import pallas_op
from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.layer_norm_residual import pallas_tpu_kernel as kernel
from vitkernels.ops.layer_norm_residual import reference
from vitkernels.ops.tpu_arrays import dtype_name, shared, tokens

_forward = pallas_op(kernel.norm_forward, name="norm_forward_tpu", shard_batch=True)
_backward = pallas_op(kernel.norm_backward, name="norm_backward_tpu", shard_batch=True)

_LARGEST_C = 8192  # 16 rows of every array must fit into VMEM


def unsupported(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype) -> str | None:
    dtypes = (x.dtype, out_dtype) if branch is None else (x.dtype, branch.dtype, out_dtype)
    reason = tpu_arrays.unsupported("x", x, dtypes)
    if reason is None and x.shape[-1] > _LARGEST_C:
        return f"a block holds rows of at most {_LARGEST_C} channels, got {x.shape[-1]}"
    return reason


def run(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype) -> tuple[Tensor, Tensor]:
    if not x.numel():
        return reference.run(x, branch, weight, bias, eps, branch_bias, layer_scale, sample_scale, out_dtype)
    settings = NormSettings(float(eps), out_dtype)
    total, normed = _LayerNormResidual.apply(x, branch, weight, bias, branch_bias, layer_scale, sample_scale, settings)
    return x if branch is None else total, normed


@dataclass(frozen=True)
class NormSettings:
    """eps, the dtype of the norm and of a product with it, and whether the product is in 8 bits."""

    eps: float
    out_dtype: torch.dtype
    eight_bit: bool = False


class Norm(NamedTuple):
    """The operands of a residual addition and its LayerNorm, as layer_norm_residual takes them."""

    x: Tensor
    branch: Tensor | None
    weight_C: Tensor
    bias_C: Tensor
    branch_bias_C: Tensor | None
    layer_scale_C: Tensor | None
    sample_scale_B: Tensor | None

    def forward(self, settings: NormSettings, extra: dict[str, Tensor | None], **static) -> tuple[Tensor, ...]:
        """Return total, and the norm or, with `extra`, the product's weight and bias, its results; as (B, N, ...)."""
        arrays = {
            "x": tokens(self.x),
            "branch": None if self.branch is None else tokens(self.branch),
            "gamma": shared(self.weight_C),
            "beta": shared(self.bias_C),
            **self._of_branch(),
            **extra,
        }
        results = tpu_arrays.run(_forward, arrays, eps=settings.eps, out=dtype_name(settings.out_dtype), **static)
        return results if self.branch is not None else (tokens(self.x), *results)

    def _of_branch(self) -> dict[str, Tensor | None]:
        scale = self.sample_scale_B
        return {
            "branch_bias": shared(self.branch_bias_C),
            "layer_scale": shared(self.layer_scale_C),
            "sample_scale": None if scale is None else scale.detach().float().contiguous(),
        }

    def kept(self, with_branch: bool = False) -> tuple[Tensor | None, ...]:
        """Return the tensors to save for `backward`, which an instance without x can be made from."""
        branch = self.branch if with_branch or self.layer_scale_C is not None else None
        return branch, self.weight_C, self.bias_C, self.branch_bias_C, self.layer_scale_C, self.sample_scale_B

    def backward(
        self,
        total: Tensor | None,
        dtotal: Tensor | None,
        incoming: dict[str, Tensor],
        eps: float,
        branch_dtype: torch.dtype | None,
    ) -> tuple[tuple[Tensor | None, ...], list[Tensor]]:
        """Return the gradients of the seven operands; with a product, also the sums of dy over all tokens and the norm.

        Args:
            total: the forward pass' sum (B, N, C); None to add x and the branch again. dtotal: its gradient, if any.
            incoming: {"dnormed": gradient of the norm}, or {"dy", "weight"}: gradient of the product and its weight,
                with "weight_scale" in 8 bits.
            branch_dtype: dtype of the branch; None without one.
        """
        scaled = self.layer_scale_C is not None or self.sample_scale_B is not None
        separate = branch_dtype if scaled or branch_dtype != self.x.dtype else None  # else dbranch equals dx
        arrays = {
            "total": total,
            "x": tokens(self.x) if total is None else None,
            "gamma": shared(self.weight_C),
            "branch": None if self.branch is None else tokens(self.branch),
            "beta": shared(self.bias_C) if "dy" in incoming else None,
            **self._of_branch(),
            "dtotal": None if dtotal is None else tokens(dtotal),
            **incoming,
        }
        static = {"eps": eps, "branch_dtype": "" if separate is None else dtype_name(separate)}
        dx, *rest = tpu_arrays.run(_backward, arrays, **static)
        dbranch = rest.pop(0) if separate is not None else dx if branch_dtype is not None else None
        sums = list(rest.pop(0).sum(0).unbind(0))
        parameters = (self.weight_C, self.bias_C, self.branch_bias_C, self.layer_scale_C)
        found = [None if p is None else sums.pop(0).to(p.dtype) for p in parameters]
        return (dx, dbranch, *found, None), [rest[0].sum((0, 1)), rest[1]] if rest else []


class _LayerNormResidual(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, branch, weight, bias, branch_bias, layer_scale, sample_scale, settings: NormSettings):
        norm = Norm(x, branch, weight, bias, branch_bias, layer_scale, sample_scale)
        total, normed = norm.forward(settings, {})
        ctx.save_for_backward(total, *norm.kept())
        ctx.eps, ctx.shape = settings.eps, x.shape
        ctx.branch_dtype = None if branch is None else branch.dtype
        ctx.set_materialize_grads(False)
        return total.view(x.shape) if branch is not None else None, normed.view(x.shape)

    @staticmethod
    @differentiable_once("layer_norm_residual by pallas_tpu")
    def backward(ctx, dtotal, dnormed):
        total, *kept = ctx.saved_tensors
        if dnormed is None:
            dnormed = torch.zeros_like(total)
        norm = Norm(total, *kept)
        gradients, _ = norm.backward(total, dtotal, {"dnormed": tokens(dnormed)}, ctx.eps, ctx.branch_dtype)
        return *as_inputs(gradients, ctx.shape), None


def as_inputs(gradients: tuple[Tensor | None, ...], shape: torch.Size) -> tuple[Tensor | None, ...]:
    """Return `Norm.backward`'s gradients with those of x and the branch in the shape of x."""
    dx, dbranch, *rest = gradients
    return None if dx is None else dx.view(shape), None if dbranch is None else dbranch.view(shape), *rest
