"""Crop and resize decoded images, on the CPU in 8 bits.

Shapes: H, W of the decoded image, h, w of the crop, C channels.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch.nn import functional as F

from vitkernels.data.decode.contract import REDUCTIONS

# torch resizes uint8 in these modes about four times as fast as Pillow, equal up to two gray levels of 255.
TORCH_MODES = ("bilinear", "bicubic")
_RESERVE = 2  # a JPEG is decoded at a reduced scale only while a crop keeps this multiple of the output's pixels


class Crop(NamedTuple):
    """A rectangle in pixels of the full-size image."""

    top: int
    left: int
    height: int
    width: int

    def within(self, height: int, width: int) -> "Crop":
        """Return this crop with at least one pixel; timm draws empty ones from images of a few pixels."""
        top, left = min(self.top, height - 1), min(self.left, width - 1)
        return Crop(top, left, max(1, self.height), max(1, self.width))

    def reduction(self, height: int, width: int) -> int:
        """Return the scale 1/n at which the image may be decoded, if the crop is then resized to (height, width).

        The decoder reduces by averaging. Another factor of two or more is left to the resize, which hides the
        difference between the two filters.
        """
        spare = min(self.height // (_RESERVE * height), self.width // (_RESERVE * width))
        return max(n for n in REDUCTIONS if n <= max(spare, 1))

    def needed(self, height: int, width: int, side: int) -> "Crop":
        """Return the part that the center square of this crop's bilinear or bicubic resize is computed from."""
        top, rows = _span(self.height, height, side)
        left, columns = _span(self.width, width, side)
        return Crop(self.top + top, self.left + left, rows, columns)

    def reduced(self, full: tuple[int, int], pixels: np.ndarray) -> "Crop":
        """Return this crop in pixels of a decoded image whose full size (width, height) is `full`."""
        height, width = pixels.shape[:2]
        if (width, height) == full:
            return self
        y, x = height / full[1], width / full[0]
        top, left = round(self.top * y), round(self.left * x)
        rows, columns = min(round(self.height * y), height - top), min(round(self.width * x), width - left)
        return Crop(top, left, rows, columns).within(height, width)


def _span(length: int, resized: int, side: int) -> tuple[int, int]:
    """Return the first pixel and the number of those that determine the central `side` pixels after a resize.

    length, resized: how many pixels there are before and after.
    """
    scale = length / resized
    reach = 2 * max(scale, 1) + 1  # of the bicubic filter, which antialiasing stretches, and one pixel for rounding
    first = center_offset(resized, side)
    begin = max(0, math.floor(first * scale - reach))
    return begin, min(length, math.ceil((first + side) * scale + reach)) - begin


def crop_and_resize(
    pixels: np.ndarray, crop: Crop, height: int, width: int, interpolation: str, by_pillow: bool = False
) -> torch.Tensor:
    """Return the crop of pixels uint8 (H, W, C) resized to uint8 (C, height, width).

    Args:
        interpolation: "nearest", "bilinear", "bicubic", "box", "hamming" or "lanczos"; each but "nearest" is
            antialiased, as in Pillow.
        by_pillow: resize with Pillow, for results equal to timm's bit for bit, instead of torch.
    """
    part = pixels[crop.top : crop.top + crop.height, crop.left : crop.left + crop.width]
    part = np.require(part, requirements=["C", "W"])  # torch warns of arrays that may not be written
    if (crop.height, crop.width) == (height, width):
        return torch.from_numpy(part).permute(2, 0, 1)
    if by_pillow or interpolation not in TORCH_MODES:
        resampling = Image.Resampling[interpolation.upper()]
        resized = Image.fromarray(part).resize((width, height), resampling)
        return torch.from_numpy(np.array(resized)).permute(2, 0, 1)
    batch = torch.from_numpy(part).permute(2, 0, 1)[None]  # channels last: torch's fast path
    return F.interpolate(batch, size=(height, width), mode=interpolation, antialias=True)[0]


def center_offset(length: int, side: int) -> int:
    """Return where the central `side` of `length` pixels start; negative if length < side, which pads both ends."""
    return round((length - side) / 2.0) if length >= side else -((side - length) // 2)


def center(pixels: torch.Tensor, size: int, border: Sequence[int]) -> torch.Tensor:
    """Crop the center of pixels (3, H, W) to (3, size, size); shorter sides are padded with this color."""
    height, width = pixels.shape[1:]
    if (height, width) == (size, size):
        return pixels
    if height < size or width < size:
        color = torch.tensor(border, dtype=pixels.dtype, device=pixels.device)
        padded = color[:, None, None].repeat(1, max(height, size), max(width, size))
        top, left = max(-center_offset(height, size), 0), max(-center_offset(width, size), 0)
        padded[:, top : top + height, left : left + width] = pixels
        pixels, (height, width) = padded, padded.shape[1:]
    top, left = center_offset(height, size), center_offset(width, size)
    return pixels[:, top : top + size, left : left + size]
