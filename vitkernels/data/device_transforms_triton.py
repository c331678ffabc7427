"""Launch the Triton kernels that implement DeviceTransforms on CUDA.

Color jitter takes two passes over the pixels, because it needs the average of each image. One more kernel flips,
normalizes, erases and mixes: it reads each pixel once and writes each value once.

Shapes: B batch, C channels, S image side.
"""

import torch
from torch import Tensor

from vitkernels.bridge.triton import cdiv, next_power_of_2, triton_call
from vitkernels.data.contract import RawBatch
from vitkernels.data.device_transforms_kernels import finish_kernel, gray_sums_kernel, jitter_kernel

_BLOCK = 1024  # positions per program, all in one channel
_EXACT = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add rounds once, not twice


def jittered(pixels: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Return pixels uint8 (B, 3, S, S) after device_transforms.jitter_colors, which explains the arguments."""
    pixels, factors, order = pixels.contiguous(), factors.contiguous(), order.contiguous()
    B, _, S, _ = pixels.shape
    tiles = cdiv(S * S, _BLOCK)
    sums, adjusted = pixels.new_empty(B, tiles, dtype=torch.int32), torch.empty_like(pixels)
    sizes = {"SIDE": S, "OPERATIONS": order.shape[1], "BLOCK": _BLOCK} | _EXACT
    if pixels.numel():
        triton_call(pixels, factors, order, sums, kernel=gray_sums_kernel, grid=(tiles, B), **sizes)
        sizes["TILES"] = next_power_of_2(tiles)
        triton_call(pixels, factors, order, sums, adjusted, kernel=jitter_kernel, grid=(tiles, B), **sizes)
    return adjusted


def finished_images(raw: RawBatch, missing: Tensor, mean: Tensor, std: Tensor, noise: bool) -> Tensor:
    """Return images float32 (B, C, S, S) of a raw batch, as DeviceTransforms does.

    Args:
        raw: its pixels are uint8.
        missing: bool (B,), rows without a sample.
        mean, std: float32, C values.
        noise: whether erased boxes hold noise; needs "erase_seed".
    """
    pixels = raw["pixels"].contiguous()
    if "jitter" in raw:
        pixels = jittered(pixels, raw["jitter"], raw["jitter_order"])
    B, C, S, _ = pixels.shape
    images = pixels.new_empty(pixels.shape, dtype=mean.dtype)
    boxes = raw.get("erase")
    seeds = raw["erase_seed"] if noise and boxes is not None else None
    colors = None if noise else raw.get("erase_colors")
    optional = (raw.get("flip"), boxes, seeds, colors, raw.get("own_share"), raw.get("other_share"), raw.get("cutmix"))
    flip, boxes, seeds, colors, own_share, other_share, cutmix = (x if x is None else x.contiguous() for x in optional)
    rows = B if own_share is None else cdiv(B, 2)  # a program computes both rows of a mixed pair
    if images.numel():
        triton_call(
            pixels, flip, mean, std, boxes, seeds, colors, missing.contiguous(), own_share, other_share, cutmix,
            images, B, kernel=finish_kernel, grid=(cdiv(S * S, _BLOCK), C, rows),
            SIDE=S, BOXES=0 if boxes is None else boxes.shape[1], BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip
    return images
