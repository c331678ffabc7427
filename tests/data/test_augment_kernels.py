"""The device's RandAugment, AutoAugment and 3-Augment equal Pillow's and timm's bit for bit, and so do their draws."""

import logging
import random

import numpy as np
import pytest
import torch
from finished_batches import finished_epoch
from PIL import Image, ImageFilter
from timm.data import auto_augment as timm_operations
from timm.data.auto_augment import NAME_TO_OP, AugmentOp, RandAugment, rand_augment_transform

pytest.importorskip("triton")
from vitkernels.data import imagefolder, images
from vitkernels.data.augment import _posterize
from vitkernels.data.augment_kernels import augmented
from vitkernels.data.augment_operations import ARGUMENTS, Operation, OperationDraws

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
FILL = (124, 116, 104)
SIDE = 23  # 529 places: the last blocks are partly beyond the image


def pictures(side=SIDE) -> list[np.ndarray]:
    """Return uint8 (S, S, 3): noise, two colors, and gradients with little noise, the second one dark."""
    drawn = np.random.default_rng(0)
    noise, little = drawn.integers(0, 256, (side, side, 3)), drawn.integers(-4, 5, (side, side, 3))
    y, x = np.mgrid[:side, :side]
    gradient = np.stack([3 * y + x, 200 - 2 * x, 40 + y], axis=-1) + little
    two = np.where((x > y)[..., None], (3, 200, 255), (0, 200, 18))  # and one level of green
    return [each.clip(0, 255).astype(np.uint8) for each in (noise, two, gradient, gradient // 3)]


def on_device(arrays, operations, device, flip=None) -> list[np.ndarray]:
    pixels = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2).to(device)
    result = augmented(pixels, torch.stack(operations).to(device), flip, FILL)
    return list(result.permute(0, 2, 3, 1).cpu().numpy())


def operation(name, magnitude, most=None) -> AugmentOp:
    settings = {"translate_const": 16, "img_mean": FILL, "magnitude_std": 2.0, "magnitude_max": most}
    op = AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=settings)
    if name.startswith("Posterize"):
        op.aug_fn = _posterize  # to 0 bits, too
    return op


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAME_TO_OP)
def test_operation__equals_pillow(name, device):
    # timm's usual magnitudes, and more than its operations are made for.
    for magnitude, most in ((8, None), (30, 40)):
        expected, draws = [], []
        for seed, picture in enumerate(pictures()):
            random.seed(seed)
            expected.append(np.array(operation(name, magnitude, most)(Image.fromarray(picture))))
            random.seed(seed)
            draws.append(OperationDraws(RandAugment([operation(name, magnitude, most)], num_layers=1), SIDE).draw())
        for number, result in enumerate(on_device(pictures(), draws, device)):
            np.testing.assert_array_equal(result, expected[number], f"picture {number}, {draws[number].tolist()}")


@pytest.mark.parametrize("device", DEVICES)
def test_quarter_turns__equal_pillow(device):
    for degrees in (0, 90, 180, 270):
        op = operation("Rotate", 0)
        op.level_fn = lambda _level, _settings, degrees=degrees: (degrees,)
        draws = OperationDraws(RandAugment([op], num_layers=1), SIDE).draw()
        noise = pictures()[0]
        (result,) = on_device([noise], [draws], device)
        assert np.array_equal(result, np.array(Image.fromarray(noise).rotate(degrees)))


@pytest.mark.parametrize("device", DEVICES)
def test_several_operations__follow_the_flip_in_their_order(device):
    def row(*entries):
        padded = [(*entry, *[0.0] * (1 + ARGUMENTS - len(entry))) for entry in entries]
        return torch.tensor(padded, dtype=torch.float64)

    shear = (Operation.AFFINE_BICUBIC, 1, 0.3, 0, 0, 1, 0)
    rows = [row((Operation.SOLARIZE, 100), shear), row(shear, (Operation.NOTHING,)), row((Operation.NOTHING,), shear)]
    picture = pictures()[2]
    flip = torch.tensor([True, False, True], device=device)
    solarized, plain, mirrored = on_device([picture] * 3, rows, device, flip)

    def sheared(array):
        image = Image.fromarray(np.ascontiguousarray(array))
        turned = image.transform(
            image.size, Image.Transform.AFFINE, shear[1:], Image.Resampling.BICUBIC, fillcolor=FILL
        )
        return np.array(turned)

    inverted = np.where(picture < 100, picture, 255 - picture)
    assert np.array_equal(solarized, sheared(inverted[:, ::-1]))
    assert np.array_equal(plain, sheared(picture)) and np.array_equal(mirrored, sheared(picture[:, ::-1]))


def test_empty_batch__stays_empty():
    operations = torch.zeros(0, 2, 1 + ARGUMENTS, dtype=torch.float64)
    assert augmented(torch.zeros(0, 3, 8, 8, dtype=torch.uint8), operations, None, FILL).shape == (0, 3, 8, 8)


MIXED = {"re_prob": 0.5, "hflip": 0, "interpolation": "random", "mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}}


@pytest.mark.parametrize(
    ("auto_augment", "recipe"),
    [
        ("3a", MIXED | {"color_jitter": 0.3}),
        ("rand-m9-mstd0.5-inc1", {}),
        ("rand-m12-n3-p0.9-mmax20", MIXED),
        ("original", {}),
        ("v0r", MIXED),
    ],
)
def test_images__are_those_that_workers_augment(auto_augment, recipe, make_root, monkeypatch):
    def batches():
        data = imagefolder.build(
            root=str(make_root(size=(60, 40))), image_size=24, in_chans=3, seed=0, batch_size=6, decode="pillow",
            auto_augment=auto_augment, **recipe,
        )  # fmt: skip
        return list(finished_epoch(data.train, 0)), data.train

    in_worker, _ = batches()
    monkeypatch.setattr(images, "_device_augments", lambda on_gpu: True)
    augmented_later, loader = batches()
    assert "operations" in next(loader.epoch(0))
    for (ours, our_targets), (theirs, their_targets) in zip(augmented_later, in_worker, strict=True):
        assert torch.equal(ours, theirs) and torch.equal(our_targets, their_targets)


def test_draws__are_deterministic_and_padded():
    draws = OperationDraws(rand_augment_transform("rand-m9-n4-mstd0.5", {"img_mean": FILL}), SIDE)

    def drawn(seed):
        random.seed(seed)
        np.random.seed(seed)
        return draws.draw()

    several = [drawn(seed) for seed in range(20)]
    assert all(each.shape == (4, 1 + ARGUMENTS) and each.dtype == torch.float64 for each in several)
    assert torch.equal(several[3], drawn(3)) and not torch.equal(several[3], several[4])
    counts = {int((each[:, 0] != Operation.NOTHING).sum()) for each in several}
    assert counts > {1, 2}  # each of four operations is applied with probability 0.5


def test_every_operation_of_timm__can_be_drawn_and_blurs_are_known():
    hparams = {"img_mean": FILL}
    for name in NAME_TO_OP:
        step = RandAugment([AugmentOp(name, hparams=hparams)])
        assert OperationDraws.can_draw(step) and OperationDraws(step, SIDE).blurs == ("Blur" in name)
    assert not OperationDraws.can_draw(timm_operations.augment_and_mix_transform("augmix-m3", hparams))


@pytest.mark.parametrize("device", DEVICES)
def test_blur__equals_pillow_at_any_radius(device):
    radii = [0.1, 0.5, 1.0, 1.3, 1.9, 2.0, 3.7, 12.0]
    noise, draws = pictures()[0], []
    for radius in radii:
        op = operation("GaussianBlur", 0)
        op.level_fn = lambda _level, _settings, radius=radius: (radius,)
        draws.append(OperationDraws(RandAugment([op], num_layers=1), SIDE).draw())
    for radius, result in zip(radii, on_device([noise] * len(radii), draws, device), strict=True):
        expected = Image.fromarray(noise).filter(ImageFilter.GaussianBlur(radius))
        np.testing.assert_array_equal(result, np.array(expected), f"radius {radius}")


def test_augmix__runs_in_the_workers_and_the_log_says_so(make_root, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(images, "_device_augments", lambda on_gpu: True)
    monkeypatch.setattr(images, "choose_decoder", lambda name, on_gpu: images.Decoder("cuda"))
    monkeypatch.setattr(images, "file_decoder", lambda log: None)
    data = imagefolder.build(
        root=str(make_root()), image_size=24, in_chans=3, seed=0, batch_size=5, auto_augment="augmix-m3"
    )
    assert "operations" not in next(data.train.epoch(0))
    assert "auto_augment=augmix-m3 runs in the workers, at twice the time" in caplog.text
