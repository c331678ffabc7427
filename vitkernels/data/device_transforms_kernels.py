"""Device code of DeviceTransforms on CUDA: two kernels for color jitter, and one for everything else.

Every operation rounds as in device_transforms, if the compiler does not fuse products and sums. Only the inverse error
function differs: it is libdevice's.

Shapes: B batch, C channels, S image side, T tiles of BLOCK positions, N boxes. `place` is a position in a channel.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def gray_sums_kernel(
    pixels_ptr, factors_ptr, order_ptr, sums_ptr, SIDE: tl.constexpr, OPERATIONS: tl.constexpr, BLOCK: tl.constexpr
):
    """Sum a tile's gray values, as they are before the change of contrast, into int32 (B, T)."""
    tile, row = tl.program_id(0), tl.program_id(1)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    red, green, blue = _colors(pixels_ptr, row, place, SIDE)
    pending = True
    for number in tl.static_range(OPERATIONS):
        operation = tl.load(order_ptr + row * OPERATIONS + number)
        pending = pending & (operation != 1)
        red, green, blue = _adjusted(red, green, blue, factors_ptr + row * 3, operation, 0, pending)
    gray = tl.where(place < SIDE * SIDE, _gray(red, green, blue), 0)
    tl.store(sums_ptr + row * tl.num_programs(0) + tile, tl.sum(gray, 0))


@triton.jit
def jitter_kernel(
    pixels_ptr, factors_ptr, order_ptr, sums_ptr, jittered_ptr,
    SIDE: tl.constexpr, OPERATIONS: tl.constexpr, BLOCK: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Adjust the colors of a tile of pixels uint8 (B, 3, S, S). TILES: the least power of two that is at least T."""
    tile, tiles, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1)
    place = tile * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, TILES)
    total = tl.sum(tl.load(sums_ptr + row * tiles + number, mask=number < tiles, other=0).to(tl.int64), 0)
    average = ((2 * total + SIDE * SIDE) // (2 * SIDE * SIDE)).to(tl.int32)  # rounded to the nearest integer
    red, green, blue = _colors(pixels_ptr, row, place, SIDE)
    for number in tl.static_range(OPERATIONS):
        operation = tl.load(order_ptr + row * OPERATIONS + number)
        red, green, blue = _adjusted(red, green, blue, factors_ptr + row * 3, operation, average, True)
    mask = place < SIDE * SIDE
    plane = jittered_ptr + row.to(tl.int64) * (3 * SIDE * SIDE) + place
    tl.store(plane, red.to(tl.uint8), mask=mask)
    tl.store(plane + SIDE * SIDE, green.to(tl.uint8), mask=mask)
    tl.store(plane + 2 * SIDE * SIDE, blue.to(tl.uint8), mask=mask)


@triton.jit
def _colors(pixels_ptr, row, place, SIDE: tl.constexpr):
    """Return red, green and blue as float32."""
    mask = place < SIDE * SIDE
    plane = pixels_ptr + row.to(tl.int64) * (3 * SIDE * SIDE) + place
    red = tl.load(plane, mask=mask, other=0).to(tl.float32)
    green = tl.load(plane + SIDE * SIDE, mask=mask, other=0).to(tl.float32)
    return red, green, tl.load(plane + 2 * SIDE * SIDE, mask=mask, other=0).to(tl.float32)


@triton.jit
def _gray(red, green, blue):
    """Return device_transforms._gray, as int32."""
    return (red.to(tl.int32) * 19595 + green.to(tl.int32) * 38470 + blue.to(tl.int32) * 7471 + 0x8000) >> 16


@triton.jit
def _adjusted(red, green, blue, factors_ptr, operation, average, enabled):
    """Return the colors after one operation of device_transforms.jitter_colors, or unchanged."""
    base = tl.where(operation == 1, average, tl.where(operation == 2, _gray(red, green, blue), 0)).to(tl.float32)
    factor = tl.load(factors_ptr + tl.minimum(operation, 2))
    changes = enabled & (operation <= 2) & (factor != 1)
    red = tl.where(changes, _blended(red, base, factor), red)
    green = tl.where(changes, _blended(green, base, factor), green)
    return red, green, tl.where(changes, _blended(blue, base, factor), blue)


@triton.jit
def _blended(color, base, factor):
    return tl.floor(tl.minimum(tl.maximum(base + factor * (color - base), 0.0), 255.0))  # Pillow truncates


@triton.jit
def finish_kernel(
    pixels_ptr, flip_ptr, mean_ptr, std_ptr, boxes_ptr, seeds_ptr, colors_ptr, missing_ptr, own_ptr, other_ptr,
    cutmix_ptr, images_ptr, B, SIDE: tl.constexpr, BOXES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute BLOCK positions of one channel of a row and, if rows are mixed, of its mirror row B-1-row.

    Pointers of steps that the batch lacks are None. The grid is (blocks of positions, channels, rows).
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
    if flip_ptr is not None:  # noqa: SIM102 (decided at compile time, unlike the next)
        if tl.load(flip_ptr + row):
            source = place + (SIDE - 1 - 2 * (place % SIDE))
    pixels = tl.load(_plane(pixels_ptr, row, channel, SIDE) + source, mask=place < SIDE * SIDE, other=0)
    share = tl.div_rn(pixels.to(tl.float32), 255.0)
    values = tl.div_rn(share - tl.load(mean_ptr + channel), tl.load(std_ptr + channel))
    for number in tl.static_range(BOXES):
        box = row * BOXES + number
        top, bottom, left, right = _edges(boxes_ptr + box * 4)
        first = tl.program_id(0) * BLOCK
        # Few programs overlap the box, and noise takes more instructions than everything else.
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
