"""Finish a batch on the training device: flip, RandAugment, color jitter, normalization, erasing, Mixup and CutMix.

A raw batch is a dictionary of tensors with the batch as first dimension. The workers drew every random number in it,
so a batch is the same on every device, up to the rounding of its arithmetic. All operations are batched PyTorch
operations with fixed shapes: a lazy or compiling runtime traces them once. On CUDA, Triton kernels do the same work
with the same arithmetic (device_transforms_triton). The operations of RandAugment and others have only
kernels (augment_kernels): off CUDA, workers apply them.

Shapes: B batch, C channels, S image side, L operations, N boxes, K classes.
"""

import functools
import importlib.util
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.data.contract import Batch, Loader, RawBatch

# Entries of a raw batch that affect only the pixels of their own row.
_PER_PIXEL = ("pixels", "flip", "jitter", "jitter_order", "erase", "erase_colors", "erase_seed")


@dataclass(frozen=True)
class DeviceTransforms:
    """The transforms of one split.

    mean, std: of red, green and blue in 0 to 1, for pixels in 8 bits; None if pixels come normalized.
    noise: whether erased boxes hold a normal random number per pixel, instead of zeros or their `erase_colors`.
    blurs: whether the operations may be Gaussian blurs.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    noise: bool = False
    blurs: bool = False

    def __call__(self, raw: RawBatch) -> Batch:
        """Return images float32 (B, C, S, S) and targets of a raw batch.

        Keys of `raw`, all optional but the first two:
            pixels: uint8 or normalized float32 (B, C, S, S).
            targets: int64 (B,) or float32 (B, K), negative for a row without a sample, or zeros if they are mixed.
            flip: bool (B,), mirror the row.
            operations: float64 (B, L, 7), of RandAugment and others, see augment_operations; pixels are uint8.
            jitter: float32 (B, 3), factors of brightness, contrast and saturation; jitter_order: int64 (B, 3 or 4).
            erase: int64 (B, N, 4), boxes (top, bottom, left, right); erase_colors: (B, N, 3); erase_seed: int64 (B,).
            missing: bool (B,), rows without a sample; needed if their targets are zeros.
            own_share, other_share: float32 (B,), Mixup's factors of a row and of its mirror row B-1-i.
            cutmix: int64 (B, 4), the box that comes from the mirror row; empty for none.
        """
        targets = raw["targets"]
        missing = raw["missing"] if "missing" in raw else targets < 0 if targets.dim() == 1 else targets[:, 0] < 0
        if "operations" in raw:
            raw = self._augmented(raw)
        by_kernel = raw["pixels"].is_cuda and raw["pixels"].dtype == torch.uint8 and self.mean is not None
        if by_kernel and has_triton():
            return self._images_by_kernel(raw, missing), targets
        rows = {name: raw[name] for name in _PER_PIXEL if name in raw}
        if targets.device.type == "cpu":  # one row at a time stays in the cache
            images = torch.cat([self._images(dict(zip(rows, row, strict=True))) for row in _single_rows(rows)])
        else:
            images = self._images(rows)
        if "own_share" in raw:
            images = mix(images, missing, raw["own_share"], raw["other_share"], raw["cutmix"])
        if missing.device.type != "cpu" or missing.any():
            images = images.masked_fill(_per_row(missing), 0.0)
        return images, targets

    def _augmented(self, raw: RawBatch) -> RawBatch:
        """Return the batch with its pixels flipped and augmented."""
        from vitkernels.data.augment_kernels import augmented

        fill = [min(255, round(255 * value)) for value in self.mean or ()]  # as timm fills
        pixels = augmented(raw["pixels"], raw["operations"], raw.get("flip"), fill, self.blurs)
        return {name: value for name, value in raw.items() if name not in ("flip", "operations")} | {"pixels": pixels}

    def _images_by_kernel(self, raw: RawBatch, missing: Tensor) -> Tensor:
        """Return the batch's images, computed by the Triton kernels."""
        from vitkernels.data.device_transforms_triton import finished_images

        _, mean, std = self._statistics(raw["pixels"].device)
        return finished_images(raw, missing, mean, std, self.noise)

    def _images(self, raw: RawBatch) -> Tensor:
        """Return normalized and erased images."""
        pixels = raw["pixels"]
        if "flip" in raw:
            pixels = torch.where(_per_row(raw["flip"]), pixels.flip(-1), pixels)
        if "jitter" in raw:
            pixels = jitter_colors(pixels.float(), raw["jitter"], raw["jitter_order"])
        if self.mean is not None:
            white, mean, std = self._statistics(pixels.device)
            pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
            pixels.div_(white).sub_(mean).div_(std)
        return self._erased(pixels, raw) if "erase" in raw else pixels

    def _statistics(self, device: torch.device) -> Iterator[Tensor]:
        """Return the value of white, mean and standard deviation of the channels, each (1, C, 1, 1).

        White is a tensor, because on CUDA PyTorch multiplies by the reciprocal of a number instead of dividing by it.
        """
        values = ((255.0,) * len(self.mean or ()), self.mean, self.std)
        return (_per_channel(tuple(each or ()), device) for each in values)

    def _erased(self, images: Tensor, raw: RawBatch) -> Tensor:
        boxes = raw["erase"]
        noise = hashed_normal(raw["erase_seed"], images.shape) if self.noise else None
        for number in range(boxes.shape[1]):
            inside = in_boxes(boxes[:, number], images.shape[-1])
            if noise is not None:
                value: Tensor | float = noise
            else:
                value = raw["erase_colors"][:, number, :, None, None] if "erase_colors" in raw else 0.0
            images = torch.where(inside, value, images)
        return images


def finished(loader: Loader, batches: Generator[Batch | RawBatch]) -> Generator[Batch]:
    """Yield (images, targets) of a loader's batches that are on the device."""
    with closing(batches):
        for batch in batches:
            yield finish(loader, batch)


def finish(loader: Loader, batch: Batch | RawBatch) -> Batch:
    """Return (images, targets) of a loader's batch that is on the device."""
    if not isinstance(batch, dict):
        return batch
    method = getattr(loader, "finish", None)
    assert method is not None, "a loader of raw batches has the method that finishes them"
    finished_batch: Batch = method(batch)
    return finished_batch


def in_boxes(boxes: Tensor, side: int) -> Tensor:
    """Return bool (B, 1, side, side): whether a pixel is in its row's box (top, bottom, left, right), int64 (B, 4)."""
    place = torch.arange(side, device=boxes.device)
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    rows, columns = (place >= top) & (place < bottom), (place >= left) & (place < right)
    return (rows[:, :, None] & columns[:, None, :])[:, None]


def mix(images: Tensor, missing: Tensor | None, own_share: Tensor, other_share: Tensor, cutmix: Tensor) -> Tensor:
    """Mix each row with its mirror row; the partner of a missing row stays unmixed.

    Sources: "mixup: Beyond Empirical Risk Minimization" (arXiv:1710.09412), "CutMix" (arXiv:1905.04899).
    """
    if missing is not None:
        images = torch.where(_per_row(missing), images.flip(0), images)  # its partner is then mixed with itself
    others = images.flip(0)
    mixed = images * _per_row(own_share) + others * _per_row(other_share)
    mixed = torch.where(_per_row(other_share == 0), images, mixed)  # exact, whatever the other row holds
    return torch.where(in_boxes(cutmix, images.shape[-1]), others, mixed)


def jitter_colors(pixels: Tensor, factors: Tensor, order: Tensor) -> Tensor:
    """Adjust brightness, contrast and saturation as Pillow's ImageEnhance does, to its exact 8-bit values.

    Args:
        pixels: whole numbers 0 to 255 as float32 (B, 3, S, S).
        factors: (B, 3), of brightness, contrast and saturation; 1 changes nothing.
        order: (B, 3 or more), the numbers 0, 1 and 2 of these operations in the order of each row; others are ignored.
    """
    for place in range(order.shape[1]):
        operation = order[:, place]
        gray = _gray(pixels)
        count = gray[0].numel()
        average = (2 * gray.sum((1, 2, 3), keepdim=True) + count) // (2 * count)  # rounded to the nearest integer
        contrast, saturation = _per_row(operation == 1), _per_row(operation == 2)
        base = torch.where(contrast, average, torch.where(saturation, gray, 0)).float()
        factor = _per_row(factors.gather(1, operation.clamp(max=2)[:, None])[:, 0])
        blended = (base + factor * (pixels - base)).clamp(0, 255).floor()  # Pillow truncates
        pixels = torch.where(_per_row((operation > 2) | (factor.flatten() == 1)), pixels, blended)
    return pixels


def hashed_normal(seeds: Tensor, shape: Sequence[int]) -> Tensor:
    """Return standard normal numbers, float32 (B, C, S, S), a function of each row's seed and the place in the row.

    The integer hash is C. Wellons' "lowbias32" (nullprogram.com/blog/2018/07/31), equal on every device.
    """
    place = torch.arange(shape[1] * shape[2] * shape[3], device=seeds.device)
    x = (seeds[:, None] * 0x9E3779B1 + place) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    x = x ^ (x >> 15)
    uniform = ((x >> 9).float() + 0.5) / (1 << 23)
    return (torch.erfinv(uniform * 2 - 1) * 2**0.5).view(*shape)


def _gray(pixels: Tensor) -> Tensor:
    """Return Pillow's luma (ITU-R 601-2 in 16-bit fixed point) of (B, 3, S, S), as int32 (B, 1, S, S)."""
    red, green, blue = pixels.to(torch.int32).unbind(1)
    return ((red * 19595 + green * 38470 + blue * 7471 + 0x8000) >> 16)[:, None]


def _single_rows(raw: RawBatch) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.split(1) for tensor in raw.values()), strict=True)


def _per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values (1, C, 1, 1)."""
    if device.type == "xla":  # a cached tensor would enter the first step's graph as an operation, later ones' as data
        return torch.tensor(values, device=device).view(1, -1, 1, 1)
    return _cached_per_channel(values, device)


@functools.cache
def _cached_per_channel(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Return values (1, C, 1, 1), copied to the device once: a copy from pageable memory would block the host."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed; no wheels exist for macOS and Windows."""
    return importlib.util.find_spec("triton") is not None


def _per_row(values: Tensor) -> Tensor:
    return values.view(-1, 1, 1, 1)
