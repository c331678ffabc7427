"""The kernels that transform batches on CUDA equal the plain transforms bit for bit."""

from types import SimpleNamespace

import pytest
import torch

from vitkernels.data.device_transforms import DeviceTransforms

pytest.importorskip("triton")
from vitkernels.data import device_transforms_kernels

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
MIXED = ("own_share", "other_share", "cutmix")
# Names of draws, and whether erased boxes hold noise.
RECIPES = {
    "normalized": ((), False),
    "flipped": (("flip",), False),
    "zeros": (("flip", "erase"), False),
    "colors": (("flip", "erase", "erase_colors"), False),
    "noise": (("flip", "erase", "erase_seed"), True),
    "mixed": (("flip", *MIXED), False),
    "everything": (("flip", "erase", "erase_seed", *MIXED), True),
    "jittered": (("jitter", "jitter_order"), False),
    "jittered and all": (("flip", "jitter", "jitter_order", "erase", "erase_colors", *MIXED), False),
}


def draw(names, B, side):
    """Return a raw batch with two boxes per row; row 1 is missing, and in large batches both rows of a pair."""
    top, left = torch.randint(0, side - 2, (2, B, 2))
    height, width = torch.randint(0, side, (2, B, 2))
    boxes = torch.stack([top, (top + height).clamp(max=side), left, (left + width).clamp(max=side)], dim=-1)
    boxes[::3, 1] = 0
    own = torch.rand(B)
    other = 1 - own
    other[::4] = 0
    cutmix = boxes[:, 0].clone()
    cutmix[1::2] = 0
    missing = torch.zeros(B, dtype=torch.bool)
    missing[[1, *([2, B - 3] if B > 6 else [])]] = True
    factors = torch.rand(B, 3) + 0.5
    factors[::3, 1] = 1
    draws = {
        "flip": torch.rand(B) < 0.5,
        "jitter": factors,
        "jitter_order": torch.stack([torch.randperm(4) for _ in range(B)]),
        "erase": boxes,
        "erase_colors": torch.randn(B, 2, 3),
        "erase_seed": torch.randint(2**31, (B,)),
        "own_share": own,
        "other_share": other,
        "cutmix": cutmix,
    }
    pixels = torch.randint(0, 256, (B, 3, side, side), dtype=torch.uint8)
    return {"pixels": pixels, "targets": torch.rand(B, 5), "missing": missing} | {name: draws[name] for name in names}


@pytest.fixture
def interpreted_erfinv(monkeypatch):
    """Let torch compute the inverse error function: Triton's interpreter has no libdevice."""
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def erfinv(x):
        found = torch.erfinv(torch.from_numpy(x.handle.data)).numpy()
        return tl.core.tensor(TensorHandle(found, tl.float32), x.type)

    monkeypatch.setattr(device_transforms_kernels, "libdevice", SimpleNamespace(erfinv=erfinv))


def by_kernels(transforms, raw):
    """Return the images as DeviceTransforms computes them on CUDA."""
    return transforms._images_by_kernel(raw, raw["missing"])


@pytest.mark.usefixtures("interpreted_erfinv")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("B", "side"), [(2, 40), (7, 33), (8, 32)])
def test_kernels__equal_the_plain_transforms_bit_for_bit(recipe, B, side):
    torch.manual_seed(side)
    names, noise = RECIPES[recipe]
    transforms, raw = DeviceTransforms(MEAN, STD, noise=noise), draw(names, B, side)
    assert torch.equal(by_kernels(transforms, raw), transforms(raw)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("B", "side"), [(2, 40), (7, 33), (32, 256), (16, 224)])
def test_on_cuda__batches_are_those_of_the_cpu(recipe, B, side):
    torch.manual_seed(side)
    names, noise = RECIPES[recipe]
    transforms, raw = DeviceTransforms(MEAN, STD, noise=noise), draw(names, B, side)
    expected = transforms(raw)[0]
    images = transforms({name: values.cuda() for name, values in raw.items()})[0].cpu()
    if noise:  # the two devices' inverse error functions differ by few units in the last place of up to 5.3
        torch.testing.assert_close(images, expected, atol=3e-6, rtol=0)
    else:
        assert torch.equal(images, expected)
