"""The kernel that crops and resizes a ragged batch, against torch's antialiased interpolation in float32."""

import numpy as np
import pytest
import torch
from test_decode import photo

from vitkernels.data.device_crops import FIELDS, DeviceCrop, DeviceCrops, resize_plainly
from vitkernels.data.geometry import Crop

pytest.importorskip("triton")
import triton.language as tl

from vitkernels.data.device_crops_kernel import resize_crops

BORDER = (1, 128, 255)


def batch_of(crops: list[DeviceCrop], side: int) -> DeviceCrops:
    return DeviceCrops.of(crops, side, torch.from_numpy(np.concatenate([crop.data.reshape(-1) for crop in crops])))


def both(batch: DeviceCrops, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    """Return the pixels that the kernel and plain PyTorch write over a value that neither computes."""
    ours, plain = (torch.full((batch.rows, 3, batch.side, batch.side), 77, dtype=torch.uint8) for _ in range(2))
    ours = ours.to(device)
    resize_crops(batch.data.to(device), batch.plans.to(device), ours, BORDER)
    resize_plainly(batch.data, batch.plans, plain, BORDER)
    return ours.cpu(), plain


def random_crop(draw: np.random.Generator, planar: bool) -> DeviceCrop:
    """Return a crop of a photo, with only the pixels that it needs; planar: of a file in some orientation."""
    # At least two pixels per side: torch 2.9 resizes images of one column wrongly on the CPU.
    width, height = (int(x) for x in draw.integers(2, 91, 2))
    top, left = int(draw.integers(height - 1)), int(draw.integers(width - 1))
    crop = Crop(top, left, int(draw.integers(2, height - top + 1)), int(draw.integers(2, width - left + 1)))
    size = tuple(int(x) for x in draw.integers(2, 41, 2))
    mode, pixels = str(draw.choice(["bilinear", "bicubic"])), np.asarray(photo(width, height))
    if planar:
        orientation = int(draw.integers(1, 9))
        stored = pixels.swapaxes(0, 1) if orientation >= 5 else pixels  # any photo will do
        return DeviceCrop(stored.transpose(2, 0, 1).copy(), orientation, (width, height), crop, *size, mode)
    return DeviceCrop.of_pixels(pixels, crop.needed(*size, 24), crop, size, mode)


@pytest.mark.parametrize("planar", [False, True], ids=["decoded by workers", "decoded on the device"])
def test_kernel__resizes_as_torch_does(planar):
    draw = np.random.default_rng(planar)
    for _ in range(8):
        crops = [random_crop(draw, planar) for _ in range(3)]
        ours, plain = both(with_gaps(crops))
        # Both are within 1e-3 of the exact value, so they differ only where it is near a half.
        assert (ours.int() - plain.int()).abs().max() <= 1
        assert (ours[::2] == 77).all()


def test_kernel__copies_pixels_that_are_not_resized():
    pixels, everything = np.asarray(photo(24, 24)), Crop(0, 0, 24, 24)
    crops = [DeviceCrop.of_pixels(pixels, everything, everything, (24, 24), mode) for mode in ("bicubic", "bilinear")]
    ours, _ = both(batch_of(crops, 24))
    assert all(np.array_equal(image.permute(1, 2, 0).numpy(), pixels) for image in ours)


def test_kernel__reads_only_the_crops(monkeypatch):
    """A tile may extend beyond the square, which is the only part of the resized image whose pixels are passed on."""
    from triton.runtime.interpreter import InterpreterBuilder

    read, load = [], InterpreterBuilder.create_masked_load

    def recorded(self, ptrs, mask, *args):
        if ptrs.dtype.element_ty == tl.uint8:
            read.append(ptrs.data[mask.data])
        return load(self, ptrs, mask, *args)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", recorded)
    pixels, everything, size, side = np.asarray(photo(120, 90)), Crop(0, 0, 90, 120), (90, 120), 44
    crop = DeviceCrop.of_pixels(pixels, everything.needed(*size, side), everything, size, "bicubic")
    batch = batch_of([crop], side)
    both(batch)
    first, last = batch.data.data_ptr(), batch.data.data_ptr() + len(batch.data) - 1
    assert read and min(x.min() for x in read) >= first and max(x.max() for x in read) <= last


def with_gaps(crops: list[DeviceCrop]) -> DeviceCrops:
    """Return the batch of these crops in every other row."""
    batch = batch_of(crops, 24)
    batch.plans[:, FIELDS.index("row")] = torch.arange(len(crops)) * 2 + 1
    return batch.padded(len(crops))


@pytest.mark.gpu
@pytest.mark.parametrize("side", [224, 256])
def test_on_gpu__images_of_many_sizes(side):
    crops = []
    for number, (height, width) in enumerate([(20, 30), (375, 500), (1500, 2000), (333, 97), (64, 900), (side, side)]):
        pixels, everything = np.asarray(photo(width, height)), Crop(0, 0, height, width)
        mode = ("bicubic", "bilinear")[number % 2]
        crops.append(DeviceCrop.of_pixels(pixels, everything, everything, (side, side), mode))
    batch = batch_of(crops, side)
    ours, plain = both(batch, "cuda")
    difference = (ours.int() - plain.int()).abs()
    assert difference.max() <= 1 and difference.float().mean() < 2e-3
    assert torch.equal(ours, both(batch, "cuda")[0])
