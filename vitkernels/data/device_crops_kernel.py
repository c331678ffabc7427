"""One Triton kernel that crops and resizes all images of a batch, whatever their sizes.

A program computes a tile of one resized image, in all three channels. It resizes each source row that the tile needs to
the tile's columns, and adds it to the tile's rows, in float32. The weights are Pillow's: a cubic (a = -0.5) or
triangular filter, stretched by the reduction, cut at the crop's edges, and normalized.

Shapes: N images, B rows, S image side.
"""
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.triton import cdiv, triton_call

# One warp: several would divide the tile's rows, and each would resize all source rows again.
_TILE = {"ROWS": 8, "COLUMNS": 64, "num_warps": 1}


def resize_crops(data: Tensor, plans: Tensor, pixels: Tensor, border: Sequence[int]) -> None:
    """Write the rows of pixels, uint8 (B, 3, S, S), that the plans name.

    Args:
        data: uint8, decoded images one after another, on the device of the other tensors.
        plans: int64 (N, len(device_crops.FIELDS)), contiguous; see there.
        border: red, green and blue, 0 to 255, of what lies outside of the resized images.
    """
    side = pixels.shape[-1]
    if len(plans):
        grid = (len(plans), cdiv(side, _TILE["ROWS"]), cdiv(side, _TILE["COLUMNS"]))
        fields = plans.shape[1]
        triton_call(data, plans, pixels, *border, kernel=crop_kernel, grid=grid, SIDE=side, FIELDS=fields, **_TILE)


@triton.jit
def crop_kernel(
    data_ptr, plans_ptr, pixels_ptr, border_red, border_green, border_blue, SIDE: tl.constexpr, FIELDS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute a tile of ROWS by COLUMNS pixels of one image. `plan + i` points to the field device_crops.FIELDS[i]."""
    plan = plans_ptr + tl.program_id(0) * FIELDS
    row, cubic = tl.load(plan), tl.load(plan + 11) == 1
    crop_height, crop_width = tl.load(plan + 7).to(tl.int32), tl.load(plan + 8).to(tl.int32)
    height, width = tl.load(plan + 9).to(tl.int32), tl.load(plan + 10).to(tl.int32)
    start, down, right, channel = _layout(data_ptr, plan)

    square_y = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    square_x = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    # Positions beyond the square repeat its last one, because `data` may lack the pixels that they depend on.
    y = tl.load(plan + 12).to(tl.int32) + tl.minimum(square_y, SIDE - 1)
    x = tl.load(plan + 13).to(tl.int32) + tl.minimum(square_x, SIDE - 1)
    center_y, shrink_y, first_y, stop_y = _reached(y, crop_height, height, cubic)
    center_x, shrink_x, first_x, stop_x = _reached(x, crop_width, width, cubic)
    taps = tl.max(stop_x - first_x, 0)

    black, blank = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((COLUMNS,), tl.float32)
    red, green, blue = black, black, black
    total_y, total_x = tl.zeros((ROWS,), tl.float32), blank
    for tap in range(taps):
        total_x += _weight(first_x + tap, center_x, shrink_x, stop_x, cubic)
    for at_y in range(tl.min(first_y, 0), tl.max(stop_y, 0)):
        line = start + at_y * down
        line_red, line_green, line_blue = blank, blank, blank
        for tap in range(taps):
            weight = _weight(first_x + tap, center_x, shrink_x, stop_x, cubic)
            source = line + tl.minimum(first_x + tap, stop_x - 1) * right
            line_red += weight * tl.load(source).to(tl.float32)
            line_green += weight * tl.load(source + channel).to(tl.float32)
            line_blue += weight * tl.load(source + 2 * channel).to(tl.float32)
        weight_y = _weight(at_y, center_y, shrink_y, stop_y, cubic)
        total_y += weight_y
        red += weight_y[:, None] * line_red[None, :]
        green += weight_y[:, None] * line_green[None, :]
        blue += weight_y[:, None] * line_blue[None, :]

    share = 1 / (total_y[:, None] * total_x[None, :])
    inside = ((y >= 0) & (y < height))[:, None] & ((x >= 0) & (x < width))[None, :]
    stored = (square_y < SIDE)[:, None] & (square_x < SIDE)[None, :]
    place = pixels_ptr + row * (3 * SIDE * SIDE) + square_y[:, None] * SIDE + square_x[None, :]
    tl.store(place, _gray_levels(red * share, inside, border_red), mask=stored)
    tl.store(place + SIDE * SIDE, _gray_levels(green * share, inside, border_green), mask=stored)
    tl.store(place + 2 * SIDE * SIDE, _gray_levels(blue * share, inside, border_blue), mask=stored)


@triton.jit
def _layout(data_ptr, plan):
    """Return the address of the crop's first pixel, and the steps to the next row, pixel and channel."""
    begin, orientation = tl.load(plan + 1), tl.load(plan + 2).to(tl.int32)
    width, height = tl.load(plan + 3).to(tl.int32), tl.load(plan + 4).to(tl.int32)
    turned = orientation >= 5
    down, right = tl.where(turned, 1, width), tl.where(turned, height, 1)
    upside_down = (orientation == 3) | (orientation == 4) | (orientation == 7) | (orientation == 8)
    mirrored = (orientation == 2) | (orientation == 3) | (orientation == 6) | (orientation == 7)
    first = tl.where(upside_down, (height - 1) * down, 0) + tl.where(mirrored, (width - 1) * right, 0)
    down, right = tl.where(upside_down, -down, down), tl.where(mirrored, -right, right)
    interleaved = orientation == 0
    down, right = tl.where(interleaved, 3 * width, down), tl.where(interleaved, 3, right)
    channel = tl.where(interleaved, 1, height * width)
    top, left = tl.load(plan + 5).to(tl.int32), tl.load(plan + 6).to(tl.int32)
    return data_ptr + begin + (first + top * down + left * right), down, right, channel


@triton.jit
def _reached(place, size, resized, cubic):
    """Return the filter of each resized position: its center in the crop, 1 / stretch, first pixel and end."""
    place = tl.minimum(tl.maximum(place, 0), resized - 1)
    scale = size.to(tl.float32) / resized.to(tl.float32)
    stretch = tl.maximum(scale, 1.0)
    reach = tl.where(cubic, 2.0, 1.0) * stretch
    center = (place.to(tl.float32) + 0.5) * scale
    first = tl.maximum((center - reach + 0.5).to(tl.int32), 0)
    return center - 0.5, 1 / stretch, first, tl.minimum((center + reach + 0.5).to(tl.int32), size)


@triton.jit
def _weight(at, center, shrink, stop, cubic):
    d = tl.minimum(tl.abs((at - center) * shrink), 2.0)
    near, far = (1.5 * d - 2.5) * d * d + 1, ((-0.5 * d + 2.5) * d - 4) * d + 2  # far is 0 at 2
    weight = tl.where(cubic, tl.where(d < 1, near, far), tl.maximum(1 - d, 0.0))
    return tl.where(at < stop, weight, 0.0)


@triton.jit
def _gray_levels(values, inside, border):
    values = tl.floor(tl.minimum(tl.maximum(values, 0.0), 255.0) + 0.5)
    return tl.where(inside, values, border * 1.0).to(tl.uint8)
