"""One Triton kernel that flips, normalizes, erases and mixes a batch: DeviceTransforms on CUDA.

It reads each pixel once and writes each value once. Its arithmetic is that of device_transforms, rounding by rounding:
products and sums are not contracted, and divisions are rounded correctly. Only the inverse error function is
libdevice's.

Shapes: B batch, C channels, S image side, N boxes.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from vitkernels.bridge.triton import cdiv, triton_call
from vitkernels.data.contract import RawBatch

_BLOCK = 1024  # pixels of a program, all in one plane of one image


def finished_images(raw: RawBatch, missing: Tensor, mean: Tensor, std: Tensor, noise: bool) -> Tensor:
    """Return images float32 (B, C, S, S) of a raw batch, as DeviceTransforms does.

    Args:
        raw: pixels are whole numbers 0 to 255, uint8 or float32. "jitter" is ignored.
        missing: bool (B,), rows without a sample.
        mean, std: float32, C values.
        noise: whether erased boxes hold noise; needs "erase_seed".
    """
    pixels = raw["pixels"].contiguous()
    B, C, S, _ = pixels.shape
    images = pixels.new_empty(pixels.shape, dtype=mean.dtype)
    boxes = raw.get("erase")
    seeds = raw["erase_seed"] if noise and boxes is not None else None
    colors = None if noise else raw.get("erase_colors")
    optional = (raw.get("flip"), boxes, seeds, colors, raw.get("own_share"), raw.get("other_share"), raw.get("cutmix"))
    flip, boxes, seeds, colors, own_share, other_share, cutmix = (x if x is None else x.contiguous() for x in optional)
    rows = B if own_share is None else cdiv(B, 2)  # a program makes both rows of a mixed pair
    if images.numel():
        triton_call(
            pixels, flip, mean, std, boxes, seeds, colors, missing.contiguous(), own_share, other_share, cutmix,
            images, B, kernel=finish_kernel, grid=(cdiv(S * S, _BLOCK), C, rows),
            SIDE=S, BOXES=0 if boxes is None else boxes.shape[1], BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return images


@triton.jit
def finish_kernel(
    pixels_ptr, flip_ptr, mean_ptr, std_ptr, boxes_ptr, seeds_ptr, colors_ptr, missing_ptr, own_ptr, other_ptr,
    cutmix_ptr, images_ptr, B, SIDE: tl.constexpr, BOXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Make BLOCK places of one channel of a row, and with shares also of its mirror row B-1-row.

    Optional pointers are None. The rows form the last axis of the grid, the channels the one before.
    """
    channel, row = tl.program_id(1), tl.program_id(2)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = _row(
        row, channel, place, pixels_ptr, flip_ptr, mean_ptr, std_ptr, boxes_ptr, seeds_ptr, colors_ptr,
        SIDE, BOXES, BLOCK,
    )  # fmt: skip
    if own_ptr is None:
        _store(own, row, channel, place, missing_ptr, images_ptr, SIDE)
    else:
        mirror = B - 1 - row
        other = _row(
            mirror, channel, place, pixels_ptr, flip_ptr, mean_ptr, std_ptr, boxes_ptr, seeds_ptr, colors_ptr,
            SIDE, BOXES, BLOCK,
        )  # fmt: skip
        mixed = _mixed(own, other, row, mirror, place, missing_ptr, own_ptr, other_ptr, cutmix_ptr, SIDE)
        _store(mixed, row, channel, place, missing_ptr, images_ptr, SIDE)
        mixed = _mixed(other, own, mirror, row, place, missing_ptr, own_ptr, other_ptr, cutmix_ptr, SIDE)
        _store(mixed, mirror, channel, place, missing_ptr, images_ptr, SIDE)


@triton.jit
def _row(
    row, channel, place, pixels_ptr, flip_ptr, mean_ptr, std_ptr, boxes_ptr, seeds_ptr, colors_ptr,
    SIDE: tl.constexpr, BOXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return flipped, normalized and erased values of a row."""
    source = place
    if flip_ptr is not None:  # noqa: SIM102 (known when the kernel is compiled, unlike the next)
        if tl.load(flip_ptr + row):
            source = place + (SIDE - 1 - 2 * (place % SIDE))
    pixels = tl.load(_plane(pixels_ptr, row, channel, SIDE) + source, mask=place < SIDE * SIDE, other=0)
    share = tl.div_rn(pixels.to(tl.float32), 255.0)
    values = tl.div_rn(share - tl.load(mean_ptr + channel), tl.load(std_ptr + channel))
    for number in tl.static_range(BOXES):
        box = row * BOXES + number
        top, bottom, left, right = _edges(boxes_ptr + box * 4)
        first = tl.program_id(0) * BLOCK
        # Most programs lie outside of the box, and noise takes more instructions than everything else.
        if (first < bottom * SIDE) & (first + BLOCK > top * SIDE) & (left < right):
            inside = _is_inside(place, top, bottom, left, right, SIDE)
            if seeds_ptr is not None:
                noise = _hashed_normal(tl.load(seeds_ptr + row), channel * (SIDE * SIDE) + place)
                values = tl.where(inside, noise, values)
            elif colors_ptr is not None:
                values = tl.where(inside, tl.load(colors_ptr + box * tl.num_programs(1) + channel), values)
            else:
                values = tl.where(inside, 0.0, values)
    return values


@triton.jit
def _mixed(own, other, row, mirror, place, missing_ptr, own_ptr, other_ptr, cutmix_ptr, SIDE: tl.constexpr):
    """Return a row mixed with its mirror row, or with itself if the mirror row is missing."""
    other = tl.where(tl.load(missing_ptr + mirror), own, other)
    other_share = tl.load(other_ptr + row)
    mixed = own * tl.load(own_ptr + row) + other * other_share
    mixed = tl.where(other_share == 0, own, mixed)
    top, bottom, left, right = _edges(cutmix_ptr + row * 4)
    return tl.where(_is_inside(place, top, bottom, left, right, SIDE), other, mixed)


@triton.jit
def _store(values, row, channel, place, missing_ptr, images_ptr, SIDE: tl.constexpr):
    values = tl.where(tl.load(missing_ptr + row), 0.0, values)
    tl.store(_plane(images_ptr, row, channel, SIDE) + place, values, mask=place < SIDE * SIDE)


@triton.jit
def _plane(ptr, row, channel, SIDE: tl.constexpr):
    """Return the address of a channel of a row: in 64 bits, as a batch may have more than 2³¹ values."""
    return ptr + (row.to(tl.int64) * tl.num_programs(1) + channel) * (SIDE * SIDE)


@triton.jit
def _edges(box_ptr):
    """Return top, bottom, left and right."""
    top, bottom = tl.load(box_ptr).to(tl.int32), tl.load(box_ptr + 1).to(tl.int32)
    return top, bottom, tl.load(box_ptr + 2).to(tl.int32), tl.load(box_ptr + 3).to(tl.int32)


@triton.jit
def _is_inside(place, top, bottom, left, right, SIDE: tl.constexpr):
    y, x = place // SIDE, place % SIDE
    return (y >= top) & (y < bottom) & (x >= left) & (x < right)


@triton.jit
def _hashed_normal(seed, place):
    """Return device_transforms.hashed_normal at these places of a row, with the hash in 32 bits."""
    x = seed.to(tl.uint32) * 0x9E3779B1 + place.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x21F0AAAD
    x = (x ^ (x >> 15)) * 0x735A2D97
    x = x ^ (x >> 15)
    uniform = ((x >> 9).to(tl.float32) + 0.5) * (1 / (1 << 23))
    return libdevice.erfinv(uniform * 2 - 1) * 1.4142135623730951
