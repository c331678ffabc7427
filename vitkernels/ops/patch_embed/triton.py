"""Unfold the images into the rows of a matrix in one pass, then use the library's matrix product.

cuDNN's convolution rounds and transposes the images in separate passes, and its weight gradient is slow if the stride
equals the kernel size. The library runs products of this size at full speed, so only the layout needs a kernel.

Shape suffixes: B images, C channels, H and W pixels, P patches of all images, K = C * patch pixels, E embedding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.ops.patch_embed.triton_kernels import unfold_kernel
from vitkernels.ops.refusals import unless_dtypes, unless_triton_device

_WIDTH = 128  # pixels of an image row that one program copies


def unsupported(images: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    return unless_triton_device("images", images) or unless_dtypes((images.dtype, dtype))


def run(images_BCHW: Tensor, weight_EChw: Tensor, bias_E: Tensor | None, dtype: torch.dtype) -> Tensor:
    B, _, H, W = images_BCHW.shape
    _, _, h, w = weight_EChw.shape
    patches_PK = unfold(images_BCHW, h, w, dtype)
    weight_EK = weight_EChw.flatten(1).to(dtype)
    bias_E = None if bias_E is None else bias_E.to(dtype)
    with torch.autocast(images_BCHW.device.type, enabled=False):
        return F.linear(patches_PK, weight_EK, bias_E).unflatten(0, (B, H // h * (W // w)))


@operator("unfold_patches(Tensor images, int patch_h, int patch_w, ScalarType dtype) -> Tensor")
def unfold(images: Tensor, patch_h: int, patch_w: int, dtype: torch.dtype) -> Tensor:
    """Return the patches as rows, (B, C, H, W) -> (P, K) in `dtype`, pixels ordered by channel, row and column."""
    cpu = images.device.type == "cpu"
    source = images.float() if cpu else images  # Triton's interpreter has no bfloat16
    B, C, H, W = images.shape
    rows, columns = H // patch_h, W // patch_w
    patches_PK = images.new_empty(B * rows * columns, C * patch_h * patch_w, dtype=torch.float32 if cpu else dtype)
    if patches_PK.numel():
        triton_call(
            source, patches_PK, *source.stride(), C, rows, columns,
            kernel=unfold_kernel, grid=(B * rows * C, cdiv(columns * patch_w, _WIDTH)),
            PATCH_H=patch_h, PATCH_W=patch_w, ROWS=next_power_of_2(patch_h), WIDTH=_WIDTH, num_warps=4,
        )  # fmt: skip
    return patches_PK.to(dtype)


@unfold.register_fake
def _(images, patch_h, patch_w, dtype):
    B, C, H, W = images.shape
    return images.new_empty(B * (H // patch_h) * (W // patch_w), C * patch_h * patch_w, dtype=dtype)


def _save(ctx, inputs, output):
    images, ctx.patch_h, ctx.patch_w, _ = inputs
    ctx.shape, ctx.dtype = images.shape, images.dtype


def _fold(ctx, dpatches_PK):
    """Return the images' gradient. Each pixel is in one patch, so nothing is summed. Rarely needed."""
    B, C, H, W = ctx.shape
    h, w = ctx.patch_h, ctx.patch_w
    dimages = dpatches_PK.view(B, H // h, W // w, C, h, w).permute(0, 3, 1, 4, 2, 5).reshape(ctx.shape)
    return dimages.to(ctx.dtype), None, None, None


unfold.register_autograd(_fold, setup_context=_save)
