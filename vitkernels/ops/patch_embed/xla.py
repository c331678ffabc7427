"""Unfold the images and multiply, both by XLA; the same functions in JAX on the CPU.

torch_xla's convolution also becomes a matrix product, after copies of its own; a Pallas kernel would have to turn rows
of 16 pixels into rows of 128, which XLA's copy does at the speed of memory.

Shape suffixes: B images, C channels, H and W pixels, P patches of an image, K = C * patch pixels, E embedding.
"""

import torch
from torch import Tensor

from vitkernels.bridge.operator import differentiable_once
from vitkernels.ops import tpu_arrays
from vitkernels.ops.patch_embed import reference
from vitkernels.ops.refusals import unless_dtypes, unless_tpu_device


def unsupported(images: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    return unless_tpu_device("images", images) or unless_dtypes((images.dtype, dtype))


def run(images_BCHW: Tensor, weight_EChw: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    if not images_BCHW.numel() or not weight_EChw.numel():
        return reference.run(images_BCHW, weight_EChw, bias_E, dtype)
    return _PatchEmbed.apply(images_BCHW, weight_EChw, bias_E, dtype)


class _PatchEmbed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, images, weight, bias, dtype: torch.dtype):
        h, w = weight.shape[2:]
        B, C, H, W = images.shape
        patches = images.to(dtype).reshape(B, C, H // h, h, W // w, w).permute(0, 2, 4, 1, 3, 5)
        patches_BPK = patches.reshape(B, H // h * (W // w), C * h * w)
        rounded_EK = weight.flatten(1).to(dtype)
        ctx.save_for_backward(patches_BPK, rounded_EK)
        ctx.images, ctx.weight = (images.shape, images.dtype), (weight.shape, weight.dtype)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return tpu_arrays.linear(patches_BPK, rounded_EK, bias)

    @staticmethod
    @differentiable_once("patch_embed by xla")
    def backward(ctx, dy):
        patches_BPK, rounded_EK = ctx.saved_tensors
        needs_dimages, needs_dweight, needs_dbias, _ = ctx.needs_input_grad
        shape, dtype = ctx.weight
        dweight = tpu_arrays.weight_gradient(dy, patches_BPK, dtype).view(shape) if needs_dweight else None
        dbias = tpu_arrays.column_sums(dy).to(ctx.bias_dtype) if needs_dbias else None
        return _fold(ctx, dy, rounded_EK, shape) if needs_dimages else None, dweight, dbias, None


def _fold(ctx, dy, rounded_EK: Tensor, weight_shape: torch.Size) -> Tensor:
    """Return the images' gradient. Each pixel is in one patch, so nothing is summed. Rarely needed."""
    (B, C, H, W), dtype = ctx.images
    h, w = weight_shape[2:]
    dpatches = tpu_arrays.input_gradient(dy, rounded_EK).view(B, H // h, W // w, C, h, w)
    return dpatches.permute(0, 3, 1, 4, 2, 5).reshape(B, C, H, W).to(dtype)
