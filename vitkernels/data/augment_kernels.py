"""Triton kernels that apply the operations of augment_operations to the images of a batch, as Pillow does.

Each operation takes two launches. The first computes a table of gray levels per channel, for operations that map levels
to levels; it reads the image if the table depends on it. The second maps, blends or moves the pixels. Six more launches
blur, if the augmentation may blur.

Every operation rounds as Pillow does, if the compiler does not fuse products and sums: in float32 where levels are
blended, and in float64 where pixels are moved.

Shapes: B rows, L operations, S image side. `place` is a position in a channel.
"""
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitkernels.bridge.triton import cdiv, triton_call
from vitkernels.data.augment_operations import ARGUMENTS, Operation
from vitkernels.data.device_transforms_kernels import _blended, _colors, _gray

_BLOCK = 512  # positions of a program
_EXACT = {"num_warps": 4, "enable_fp_fusion": False}  # a fused multiply-add rounds once, not twice
_FIELDS = tl.constexpr(1 + ARGUMENTS)
_SOLARIZE, _SOLARIZE_ADD = tl.constexpr(int(Operation.SOLARIZE)), tl.constexpr(int(Operation.SOLARIZE_ADD))
_POSTERIZE, _BRIGHTNESS = tl.constexpr(int(Operation.POSTERIZE)), tl.constexpr(int(Operation.BRIGHTNESS))
_CONTRAST, _COLOR = tl.constexpr(int(Operation.CONTRAST)), tl.constexpr(int(Operation.COLOR))
_SHARPNESS, _AUTOCONTRAST = tl.constexpr(int(Operation.SHARPNESS)), tl.constexpr(int(Operation.AUTOCONTRAST))
_EQUALIZE, _AFFINE_BILINEAR = tl.constexpr(int(Operation.EQUALIZE)), tl.constexpr(int(Operation.AFFINE_BILINEAR))
_AFFINE_BICUBIC = tl.constexpr(int(Operation.AFFINE_BICUBIC))
_GAUSSIAN_BLUR = tl.constexpr(int(Operation.GAUSSIAN_BLUR))


def augmented(
    pixels: Tensor, operations: Tensor, flip: Tensor | None, fill: Sequence[int], blurs: bool = True
) -> Tensor:
    """Return pixels uint8 (B, 3, S, S) after the operations of each row.

    Args:
        operations: float64 (B, L, 1 + ARGUMENTS), as OperationDraws.draw returns them.
        flip: bool (B,), rows that are mirrored first; None for none.
        fill: red, green and blue, 0 to 255, of pixels that come from outside of the image.
        blurs: whether an operation may be a Gaussian blur.
    """
    pixels, operations = pixels.contiguous(), operations.contiguous()
    B, _, S, _ = pixels.shape
    tables = pixels.new_empty(B, 3, 256)
    for number in range(operations.shape[1] if pixels.numel() else 0):
        current = operations[:, number].contiguous()
        triton_call(pixels, current, tables, kernel=tables_kernel, grid=(3, B), SIDE=S, BLOCK=2 * _BLOCK, **_EXACT)
        result = torch.empty_like(pixels)
        triton_call(
            pixels, current, tables, None if flip is None else flip.contiguous(), result, *fill,
            kernel=operation_kernel, grid=(cdiv(S * S, _BLOCK), B), SIDE=S, BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip
        if blurs:
            _blur(result, current)
        pixels, flip = result, None
    return pixels


def _blur(pixels: Tensor, operations: Tensor) -> None:
    """Blur, in place, the rows whose operation is a Gaussian blur: by three box blurs along rows, and three down."""
    B, _, S, _ = pixels.shape
    source, target = pixels, torch.empty_like(pixels)
    for vertical in (False, False, False, True, True, True):
        triton_call(
            source, operations, target,
            kernel=blur_kernel, grid=(cdiv(S * S, _BLOCK), 3, B), SIDE=S, VERTICAL=vertical, BLOCK=_BLOCK, **_EXACT,
        )  # fmt: skip
        source, target = target, source


@triton.jit
def tables_kernel(pixels_ptr, operations_ptr, tables_ptr, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Fill the table of a row and a channel, uint8 (256,), if its operation maps gray levels to gray levels."""
    channel, row = tl.program_id(0), tl.program_id(1)
    argument_ptr = operations_ptr + row * _FIELDS + 1
    operation = tl.load(argument_ptr - 1).to(tl.int32)
    level = tl.arange(0, 256)
    table = level
    if operation == _SOLARIZE:
        table = tl.where(level < tl.load(argument_ptr).to(tl.int32), level, 255 - level)
    elif operation == _SOLARIZE_ADD:
        brighter = tl.minimum(level + tl.load(argument_ptr).to(tl.int32), 255)
        table = tl.where(level < 128, brighter, level)
    elif operation == _POSTERIZE:
        table = level & tl.load(argument_ptr).to(tl.int32)
    elif operation == _BRIGHTNESS:
        table = _blended(level.to(tl.float32), 0.0, tl.load(argument_ptr).to(tl.float32)).to(tl.int32)
    elif operation == _CONTRAST:
        average = _average_gray(pixels_ptr, row, SIDE, BLOCK).to(tl.float32)
        table = _blended(level.to(tl.float32), average, tl.load(argument_ptr).to(tl.float32)).to(tl.int32)
    elif operation == _AUTOCONTRAST:
        table = _stretched(_histogram(pixels_ptr, row, channel, SIDE, BLOCK), level)
    elif operation == _EQUALIZE:
        table = _equalized(_histogram(pixels_ptr, row, channel, SIDE, BLOCK), level, SIDE)
    tl.store(tables_ptr + (row * 3 + channel) * 256 + level, table.to(tl.uint8))


@triton.jit
def _average_gray(pixels_ptr, row, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the average gray level of a row, rounded to the nearest integer."""
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, SIDE * SIDE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        red, green, blue = _colors(pixels_ptr, row, place, SIDE)
        total += tl.where(place < SIDE * SIDE, _gray(red, green, blue), 0)
    return ((2 * tl.sum(total.to(tl.int64), 0) + SIDE * SIDE) // (2 * SIDE * SIDE)).to(tl.int32)


@triton.jit
def _histogram(pixels_ptr, row, channel, SIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Return how many pixels of a channel have each gray level, int32 (256,)."""
    plane = pixels_ptr + (row.to(tl.int64) * 3 + channel) * (SIDE * SIDE)
    counts = tl.zeros((256,), tl.int32)
    for first in range(0, SIDE * SIDE, BLOCK):
        place = first + tl.arange(0, BLOCK)
        counts += tl.histogram(tl.load(plane + place, mask=place < SIDE * SIDE, other=0).to(tl.int32), 256)
    beyond: tl.constexpr = (BLOCK - SIDE * SIDE % BLOCK) % BLOCK  # places of the last block, counted as level 0
    return counts - tl.where(tl.arange(0, 256) == 0, beyond, 0)


@triton.jit
def _stretched(counts, level):
    """Return the table that maps the lowest level to 0 and the highest to 255."""
    low, high = tl.min(tl.where(counts > 0, level, 256), 0), tl.max(tl.where(counts > 0, level, 0), 0)
    scale = 255.0 / tl.maximum(high - low, 1).to(tl.float64)
    table = (level.to(tl.float64) * scale + -low.to(tl.float64) * scale).to(tl.int32)
    return tl.where(high > low, tl.minimum(tl.maximum(table, 0), 255), level)


@triton.jit
def _equalized(counts, level, SIDE: tl.constexpr):
    """Return the table that spreads the levels evenly."""
    highest = tl.max(tl.where(counts > 0, level, 0), 0)
    step = (SIDE * SIDE - tl.sum(tl.where(level == highest, counts, 0), 0)) // 255
    below = tl.cumsum(counts, 0) - counts
    table = (step // 2 + below) // tl.maximum(step, 1)
    return tl.where(step > 0, tl.minimum(table, 255), level)


@triton.jit
def operation_kernel(
    pixels_ptr, operations_ptr, tables_ptr, flip_ptr, result_ptr, fill_red, fill_green, fill_blue,
    SIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Apply a row's operation to BLOCK of its pixels uint8 (B, 3, S, S)."""
    row = tl.program_id(1)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stored = place < SIDE * SIDE
    place = tl.minimum(place, SIDE * SIDE - 1)
    y, x = place // SIDE, place % SIDE
    mirrored = False
    if flip_ptr is not None:
        mirrored = tl.load(flip_ptr + row) != 0
    red_ptr = pixels_ptr + row.to(tl.int64) * (3 * SIDE * SIDE)
    green_ptr, blue_ptr = red_ptr + SIDE * SIDE, red_ptr + 2 * SIDE * SIDE
    argument_ptr = operations_ptr + row * _FIELDS + 1
    operation = tl.load(argument_ptr - 1).to(tl.int32)
    source = _source(y, x, mirrored, SIDE)
    red, green, blue = tl.load(red_ptr + source), tl.load(green_ptr + source), tl.load(blue_ptr + source)
    if operation == _COLOR:
        factor = tl.load(argument_ptr).to(tl.float32)
        red_level, green_level, blue_level = red.to(tl.float32), green.to(tl.float32), blue.to(tl.float32)
        gray = _gray(red_level, green_level, blue_level).to(tl.float32)
        red = _blended(red_level, gray, factor).to(tl.uint8)
        green = _blended(green_level, gray, factor).to(tl.uint8)
        blue = _blended(blue_level, gray, factor).to(tl.uint8)
    elif operation == _SHARPNESS:
        factor = tl.load(argument_ptr).to(tl.float32)
        red = _sharpened(red_ptr, red, y, x, mirrored, factor, SIDE)
        green = _sharpened(green_ptr, green, y, x, mirrored, factor, SIDE)
        blue = _sharpened(blue_ptr, blue, y, x, mirrored, factor, SIDE)
    elif (operation == _AFFINE_BILINEAR) | (operation == _AFFINE_BICUBIC):
        cubic = operation == _AFFINE_BICUBIC
        from_x = _affine(argument_ptr, y, x)
        from_y = _affine(argument_ptr + 3, y, x)
        red = _moved(red_ptr, from_y, from_x, mirrored, cubic, fill_red, SIDE)
        green = _moved(green_ptr, from_y, from_x, mirrored, cubic, fill_green, SIDE)
        blue = _moved(blue_ptr, from_y, from_x, mirrored, cubic, fill_blue, SIDE)
    elif (operation > 0) & (operation != _GAUSSIAN_BLUR):  # the blur follows in launches of its own
        table_ptr = tables_ptr + row * (3 * 256)
        red, green = tl.load(table_ptr + red.to(tl.int32)), tl.load(table_ptr + 256 + green.to(tl.int32))
        blue = tl.load(table_ptr + 512 + blue.to(tl.int32))
    stored_ptr = result_ptr + row.to(tl.int64) * (3 * SIDE * SIDE) + place
    tl.store(stored_ptr, red, mask=stored)
    tl.store(stored_ptr + SIDE * SIDE, green, mask=stored)
    tl.store(stored_ptr + 2 * SIDE * SIDE, blue, mask=stored)


@triton.jit
def _source(y, x, mirrored, SIDE: tl.constexpr):
    """Return the place of these coordinates in the image before it was mirrored."""
    return y * SIDE + tl.where(mirrored, SIDE - 1 - x, x)


@triton.jit
def _level(plane_ptr, y, x, mirrored, SIDE: tl.constexpr):
    """Return gray levels; coordinates beyond the image are those of its edge."""
    y, x = tl.minimum(tl.maximum(y, 0), SIDE - 1), tl.minimum(tl.maximum(x, 0), SIDE - 1)
    return tl.load(plane_ptr + _source(y, x, mirrored, SIDE)).to(tl.int32)


@triton.jit
def _sharpened(plane_ptr, own, y, x, mirrored, factor, SIDE: tl.constexpr):
    """Return pixels blended with Pillow's filter SMOOTH, which leaves the edge of an image as it is."""
    own = own.to(tl.int32)
    total = 4 * own
    for row in tl.static_range(-1, 2):
        for column in tl.static_range(-1, 2):
            total += _level(plane_ptr, y + row, x + column, mirrored, SIDE)
    edge = (y == 0) | (y == SIDE - 1) | (x == 0) | (x == SIDE - 1)
    smooth = tl.where(edge, own, (2 * total + 13) // 26)  # a 13th of the total, to the nearest integer
    return _blended(own.to(tl.float32), smooth.to(tl.float32), factor).to(tl.uint8)


@triton.jit
def _affine(matrix_ptr, y, x):
    """Return a coordinate of the source, in which the pixel n reaches from n to n + 1."""
    by_x, by_y, offset = tl.load(matrix_ptr), tl.load(matrix_ptr + 1), tl.load(matrix_ptr + 2)
    return by_x * (x.to(tl.float64) + 0.5) + by_y * (y.to(tl.float64) + 0.5) + offset


@triton.jit
def _moved(plane_ptr, from_y, from_x, mirrored, cubic, fill, SIDE: tl.constexpr):
    """Return interpolated pixels, and `fill` for those from outside of the image."""
    top, left = tl.floor(from_y - 0.5), tl.floor(from_x - 0.5)
    down, right = from_y - 0.5 - top, from_x - 0.5 - left
    top, left = top.to(tl.int32), left.to(tl.int32)
    if cubic:
        above = _cubic_row(plane_ptr, top - 1, left, right, mirrored, SIDE)
        first = _cubic_row(plane_ptr, top, left, right, mirrored, SIDE)
        second = _cubic_row(plane_ptr, top + 1, left, right, mirrored, SIDE)
        below = _cubic_row(plane_ptr, top + 2, left, right, mirrored, SIDE)
        level = _cubic(above, first, second, below, down)
    else:
        first = _linear_row(plane_ptr, top, left, right, mirrored, SIDE)
        second = _linear_row(plane_ptr, top + 1, left, right, mirrored, SIDE)
        level = first + (second - first) * down
    inside = (from_y >= 0) & (from_y < SIDE) & (from_x >= 0) & (from_x < SIDE)
    level = tl.minimum(tl.maximum(level, 0.0), 255.0).to(tl.int32)  # Pillow truncates
    return tl.where(inside, level, fill).to(tl.uint8)


@triton.jit
def _linear_row(plane_ptr, y, x, share, mirrored, SIDE: tl.constexpr):
    """Return levels between two columns, as float64."""
    left = _level(plane_ptr, y, x, mirrored, SIDE).to(tl.float64)
    return left + (_level(plane_ptr, y, x + 1, mirrored, SIDE).to(tl.float64) - left) * share


@triton.jit
def _cubic_row(plane_ptr, y, x, share, mirrored, SIDE: tl.constexpr):
    """Return levels between the inner two of four columns, as float64."""
    a = _level(plane_ptr, y, x - 1, mirrored, SIDE).to(tl.float64)
    b = _level(plane_ptr, y, x, mirrored, SIDE).to(tl.float64)
    c = _level(plane_ptr, y, x + 1, mirrored, SIDE).to(tl.float64)
    return _cubic(a, b, c, _level(plane_ptr, y, x + 2, mirrored, SIDE).to(tl.float64), share)


@triton.jit
def _cubic(a, b, c, d, share):
    """Return the cubic convolution between b and c with Pillow's coefficient of -1, in Horner's form."""
    return b + share * (c - a + share * (2 * (a - b) + c - d + share * (-a + b - c + d)))


@triton.jit
def blur_kernel(
    source_ptr, operations_ptr, target_ptr, SIDE: tl.constexpr, VERTICAL: tl.constexpr, BLOCK: tl.constexpr
):
    """Blur BLOCK pixels of a channel of a row by a box, if the row's operation is a Gaussian blur."""
    channel, row = tl.program_id(1), tl.program_id(2)
    argument_ptr = operations_ptr + row * _FIELDS + 1
    if tl.load(argument_ptr - 1).to(tl.int32) == _GAUSSIAN_BLUR:
        reach = tl.load(argument_ptr).to(tl.int32)
        weight, edge_weight = tl.load(argument_ptr + 1).to(tl.int64), tl.load(argument_ptr + 2).to(tl.int64)
        place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        y, x = tl.minimum(place // SIDE, SIDE - 1), place % SIDE
        plane = (row.to(tl.int64) * 3 + channel) * (SIDE * SIDE)
        down: tl.constexpr = 1 if VERTICAL else 0
        right: tl.constexpr = 1 - down
        before = _level(source_ptr + plane, y - (reach + 1) * down, x - (reach + 1) * right, False, SIDE)
        edges = before + _level(source_ptr + plane, y + (reach + 1) * down, x + (reach + 1) * right, False, SIDE)
        box = tl.zeros((BLOCK,), tl.int32)
        for step in range(-reach, reach + 1):
            box += _level(source_ptr + plane, y + step * down, x + step * right, False, SIDE)
        level = (box.to(tl.int64) * weight + edges.to(tl.int64) * edge_weight + 2**23) >> 24
        tl.store(target_ptr + plane + place, level.to(tl.uint8), mask=place < SIDE * SIDE)
