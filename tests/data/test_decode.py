"""Decoders and geometry: equal pixels, orientation, reduced scales, and Pillow as the reference."""

import io
import random

import numpy as np
import pytest
import torch
from expecting import error
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image
from timm.data import create_transform

from vitkernels.data.augment import EvalPreprocessing, TrainAugmentation, _SizeOnly
from vitkernels.data.decode import Decoder, choose_decoder
from vitkernels.data.device_transforms import DeviceTransforms, jitter_colors
from vitkernels.data.geometry import Crop, crop_and_resize
from vitkernels.data.randomness import Stream, seeded_globals

PLAIN = {"interpolation": "bicubic", "mean": [0.5] * 3, "scale": [0.08, 1], "ratio": [0.75, 4 / 3], "hflip": 0.5}
PLAIN |= {"color_jitter": None, "auto_augment": None, "re_prob": 0.0, "re_mode": "const", "re_count": 1}


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Draw a smooth image with some texture, as photos have it: noise would be a worst case that no photo reaches."""
    draw, image = np.random.default_rng(seed), np.zeros((height, width, 3), np.float32)
    for cells, share in ((8, 0.6), (40, 0.3), (160, 0.1)):
        coarse = Image.fromarray(draw.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
        image += share * np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    return Image.fromarray(image.clip(0, 255).astype(np.uint8))


def encoded(image: Image.Image, kind: str = "jpeg", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def both(data: bytes) -> tuple[np.ndarray, np.ndarray]:
    one, other = (Decoder(name).decode(Decoder(name).open(data)) for name in ("pillow", "turbo"))
    return one, other


@pytest.mark.parametrize("options", [{}, {"quality": 95, "subsampling": 0}, {"progressive": True}, {"subsampling": 2}])
def test_turbo__equals_pillow_bit_for_bit(options):
    pillow, turbo = both(encoded(photo(123, 77), **options))
    assert pillow.shape == turbo.shape == (77, 123, 3) and np.array_equal(pillow, turbo)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation__is_applied_as_pillow_does(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(photo(40, 24), exif=exif)
    from PIL import ImageOps

    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    for name in ("pillow", "turbo"):
        image = Decoder(name).open(data)
        decoded = Decoder(name).decode(image)
        assert np.array_equal(decoded, expected) and image.size == decoded.shape[1::-1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (encoded(photo(20, 20), "png"), "not a JPEG file"),
        (encoded(photo(20, 20).convert("CMYK")), "JPEG in "),
    ],
    ids=["png", "cmyk"],
)
def test_turbo__leaves_other_formats_to_pillow(data, reason):
    image = Decoder("turbo").open(data)
    assert image.fallback is not None and image.fallback.startswith(reason)
    assert np.array_equal(*both(data))


def test_turbo__damaged_file_raises_what_pillow_raises():
    data = encoded(photo(200, 200))[:4000]
    for name in ("pillow", "turbo"):
        with pytest.raises(OSError, match="truncated"):
            Decoder(name).decode(Decoder(name).open(data))


@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_reduction__halves_sides_rounded_up(reduction):
    decoder = Decoder("turbo")
    image = decoder.open(encoded(photo(333, 217)))
    assert decoder.decode(image, reduction).shape == (-(-217 // reduction), -(-333 // reduction), 3)
    assert image.size == (333, 217)


def test_reduction__keeps_twice_the_output():
    assert Crop(0, 0, 511, 2000).reduction(256, 256) == 1
    assert Crop(0, 0, 1024, 1024).reduction(256, 256) == 2
    assert Crop(0, 0, 3000, 4000).reduction(224, 224) == 4
    assert Crop(0, 0, 9000, 9000).reduction(224, 224) == 8


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_reduced_crop__stays_inside(data):
    width, height = data.draw(st.integers(1, 500)), data.draw(st.integers(1, 500))
    top, left = data.draw(st.integers(0, height - 1)), data.draw(st.integers(0, width - 1))
    crop = Crop(top, left, data.draw(st.integers(1, height - top)), data.draw(st.integers(1, width - left)))
    reduction = data.draw(st.sampled_from([1, 2, 4, 8]))
    pixels = np.zeros((-(-height // reduction), -(-width // reduction), 3), np.uint8)
    reduced = crop.reduced((width, height), pixels)
    assert min(reduced.height, reduced.width) >= 1 and min(reduced.top, reduced.left) >= 0
    assert reduced.top + reduced.height <= pixels.shape[0] and reduced.left + reduced.width <= pixels.shape[1]


@settings(max_examples=40, deadline=None)
@given(
    height=st.integers(8, 400),
    width=st.integers(8, 400),
    side=st.integers(8, 256),
    mode=st.sampled_from(["bicubic", "bilinear"]),
)
def test_resize__by_torch_is_within_two_gray_levels_of_pillow(height, width, side, mode):
    pixels = np.asarray(photo(width, height))
    crop = Crop(0, 0, height, width)
    ours, pillows = (crop_and_resize(pixels, crop, side, side, mode, by_pillow=x).int() for x in (False, True))
    difference = (ours - pillows).abs()
    # torch holds its weights in 16 bits and Pillow in 22, and each rounds to 8 bits after each of the two passes.
    assert difference.max() <= 2 and difference.float().mean() < 0.25


@pytest.mark.parametrize("size", [(500, 375), (4000, 3000)], ids=["web", "camera"])
def test_turbo__training_image_is_close_to_the_reference(size):
    data = encoded(photo(*size), quality=90)
    augmentation = TrainAugmentation(224, **PLAIN)
    worst, means = 0.0, []
    for index in range(8):
        images = []
        for name in ("pillow", "turbo"):
            decoder = Decoder(name)
            with seeded_globals(0, Stream.SAMPLE, index):
                images.append(augmentation(decoder.open(data), decoder))
        one, other = (image.pixels.int() for image in images)
        assert images[0].draws == images[1].draws
        worst, means = max(worst, (one - other).abs().max().item()), [*means, (one - other).abs().float().mean().item()]
    # At a reduced scale libjpeg averages differently from Pillow's antialiasing, before the last factor of two, and the
    # crop's edges are rounded to pixels of that scale.
    assert worst <= (2 if size[0] == 500 else 16) and max(means) < (0.1 if size[0] == 500 else 2.5), (worst, means)


@pytest.mark.parametrize("recipe", [{}, {"color_jitter": 0.4}, {"color_jitter": 0.4, "re_prob": 0.7, "re_count": 3}])
@pytest.mark.parametrize("mode", ["const", "rand"])
def test_training_image__equals_that_of_timm(recipe, mode):
    """The reference decoder, and draws applied on the device, against timm's transform of one image."""
    statistics = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
    options = PLAIN | {"mean": statistics["mean"], "re_mode": mode} | recipe
    augmentation, finish = TrainAugmentation(64, **options), DeviceTransforms(**statistics)
    timms = create_transform(64, is_training=True, **options | statistics)
    data, decoder = encoded(photo(120, 90)), Decoder("pillow")
    for index in range(30):
        with seeded_globals(0, Stream.SAMPLE, index):
            prepared = augmentation(decoder.open(data), decoder)
        with seeded_globals(0, Stream.SAMPLE, index):
            expected = timms(Image.open(io.BytesIO(data)))
        raw = {name: draw[None] for name, draw in prepared.draws.items()}
        image = finish({"pixels": prepared.pixels[None], "targets": torch.zeros(1, dtype=torch.int64), **raw})[0][0]
        if mode == "rand" and "erase" in raw:  # the colors are drawn in another order: compare what no box covers
            covered = image.new_zeros(64, 64, dtype=torch.bool)
            for top, bottom, left, right in raw["erase"][0]:
                covered[top:bottom, left:right] = True
            image, expected = image.masked_fill(covered, 0), expected.masked_fill(covered, 0)
        assert torch.equal(image, expected)


def test_erased_pixels__are_normal_and_a_function_of_the_seed():
    finish = DeviceTransforms(mean=[0.5] * 3, std=[0.5] * 3, noise=True)
    raw = {
        "pixels": torch.zeros(3, 3, 128, 128, dtype=torch.uint8),
        "targets": torch.zeros(3, dtype=torch.int64),
        "erase": torch.tensor([[0, 128, 0, 128]]).repeat(3, 1, 1),
        "erase_seed": torch.tensor([5, 5, 6]),
    }
    images, _ = finish(raw)
    assert torch.equal(images[0], images[1]) and not torch.equal(images[0], images[2])
    # 49,152 draws: the standard error of the mean is 0.0045, of the standard deviation 0.0032.
    assert abs(images[0].mean()) < 0.02 and abs(images[0].std() - 1) < 0.015 and images.isfinite().all()
    flat = images[0].flatten()
    assert abs(torch.corrcoef(torch.stack([flat[1:], flat[:-1]]))[0, 1]) < 0.02
    assert abs(torch.corrcoef(torch.stack([images[0].flatten(), images[2].flatten()]))[0, 1]) < 0.02


def test_jitter__factor_of_one_changes_nothing():
    pixels = torch.randint(256, (2, 3, 8, 8)).float()
    assert torch.equal(jitter_colors(pixels, torch.ones(2, 3), torch.tensor([[0, 1, 2], [2, 1, 0]])), pixels)


@pytest.mark.parametrize("crop_mode", ["center", "squash", "border"])
@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(4, 300),
    height=st.integers(4, 300),
    side=st.sampled_from([32, 37, 64]),
    crop_pct=st.sampled_from([0.875, 0.9, 1.0]),
)
def test_evaluation_image__has_the_geometry_of_timm(crop_mode, width, height, side, crop_pct):
    resized = int(side / crop_pct)
    assume(crop_mode != "border" or round(resized * min(width, height) / max(width, height)))  # timm needs a pixel
    data, decoder = encoded(photo(width, height), "png"), Decoder("pillow")
    options = {"interpolation": "bicubic", "crop_pct": crop_pct, "crop_mode": crop_mode, "mean": (0.4, 0.5, 0.6)}
    ours = EvalPreprocessing(side, **options)(decoder.open(data), decoder).pixels
    theirs = create_transform(side, std=(0.25, 0.25, 0.25), **options)(Image.open(io.BytesIO(data)))
    finish = DeviceTransforms(mean=options["mean"], std=(0.25, 0.25, 0.25))
    assert torch.equal(finish({"pixels": ours[None], "targets": torch.zeros(1, dtype=torch.int64)})[0][0], theirs)


def test_border__keeps_one_pixel_of_an_image_too_narrow_for_timm():
    data, decoder = encoded(photo(4, 256), "png"), Decoder("pillow")
    prepare = EvalPreprocessing(32, interpolation="bicubic", crop_pct=1.0, crop_mode="border", mean=(0.4, 0.5, 0.6))
    pixels = prepare(decoder.open(data), decoder).pixels
    border = torch.tensor([102, 128, 153], dtype=torch.uint8)[:, None]  # 255 times the mean
    columns = [x for x in range(32) if not torch.equal(pixels[:, :, x], border.expand(3, 32))]
    assert len(columns) == 1


def test_decoder__unknown_or_missing_is_refused(monkeypatch):
    with error("unknown_name", name="turbojpeg"):
        choose_decoder("turbojpeg")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with error("data.decode", decode="turbo"):
        choose_decoder("turbo")
    assert choose_decoder("auto").name == "pillow"


def test_flip__draws_the_numbers_of_torchvision():
    augmentation = TrainAugmentation(32, **PLAIN | {"hflip": 0.3})
    for seed in range(200):
        torch.manual_seed(seed)
        flip = augmentation._draw_for_device()["flip"]
        torch.manual_seed(seed)
        assert flip == (torch.rand(1) < 0.3).item()


def test_image_stand_in__gets_the_same_crop_as_an_image():
    random.seed(0)
    ours = TrainAugmentation(32, **PLAIN)._crop.get_params(_SizeOnly((120, 90)), (0.08, 1), (0.75, 1.33))
    random.seed(0)
    assert ours == TrainAugmentation(32, **PLAIN)._crop.get_params(Image.new("RGB", (120, 90)), (0.08, 1), (0.75, 1.33))
