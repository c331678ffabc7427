"""One pass that cuts the images into the rows of a matrix, and the library's matrix product.

cuDNN's convolution rounds and transposes the images in passes of its own, and its weight gradient is slow for a stride
as wide as the kernel. Products this size run at the library's full speed, so only the layout is worth a kernel.

Shape suffixes: B images, C channels, H and W pixels, P patches of all images, K = C * patch pixels, E embedding.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.bridge.operator import operator
from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.ops.patch_embed.triton_kernels import unfold_kernel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDTH = 128  # pixels of a strip that a program takes


def unsupported(images: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> str | None:
    if images.device.type not in ("cuda", "cpu"):
        return f"Triton runs on NVIDIA GPUs, and interpreted on CPUs; images are on {images.device}"
    if images.dtype not in _DTYPES or dtype not in _DTYPES:
        return f"it takes float32, bfloat16 and float16, got {images.dtype} for {dtype}. Use backend='reference'"
    return None


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
    """(B, C, H, W) -> (P, K) in `dtype`: a row is a patch, channel by channel, line by line."""
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
    """Every pixel is in one patch, so its gradient is moved and not summed; training seldom asks for it."""
    B, C, H, W = ctx.shape
    h, w = ctx.patch_h, ctx.patch_w
    dimages = dpatches_PK.view(B, H // h, W // w, C, h, w).permute(0, 3, 1, 4, 2, 5).reshape(ctx.shape)
    return dimages.to(ctx.dtype), None, None, None


unfold.register_autograd(_fold, setup_context=_save)
