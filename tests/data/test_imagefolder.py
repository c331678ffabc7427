"""Training and evaluating on image folders: exact resuming, colour modes, corrupt files."""

import io
import logging
import shutil
import warnings

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vitkernels.data import imagefolder
from vitkernels.data.augment import _posterize, train_transform
from vitkernels.data.loader import BadImagesError
from vitkernels.errors import UsageError

SIDE = 24
RECIPE = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "color_jitter": 0.4, "interpolation": "random"}


def build(root, **kwargs):
    defaults = {"image_size": SIDE, "in_chans": 3, "seed": 0, "batch_size": 4, "max_bad_share": 0.5}
    return imagefolder.build(root=str(root), **defaults | kwargs)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_resuming_in_an_epoch_is_exact(num_workers, make_root, same, rng_state):
    root = make_root()
    truncate(root / "train" / "b" / "2.jpg")
    recipe = RECIPE | {"mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}}
    whole = list(build(root, **recipe).train.epoch(1))
    before = rng_state()
    data = build(root, num_workers=num_workers, **recipe)
    next(data.train.epoch(0))  # left in the middle
    assert same(data.train.epoch(1, start=3), whole[3:])
    assert same(data.train.epoch(1), whole)
    assert same(data.val.epoch(0), build(root).val.epoch(7))
    assert rng_state() == before


def test_epochs_and_seeds_differ(make_root, same):
    root = make_root()
    batches = [next(build(root, seed=seed).train.epoch(epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert not any(same([a], [b]) for i, a in enumerate(batches) for b in batches[:i])


def test_a_sample_depends_on_seed_epoch_and_index_alone(make_root):
    root = make_root()

    def samples(epoch, **kwargs):
        loader = build(root, **RECIPE | kwargs).train
        return {
            i: image
            for batch, (images, _) in enumerate(loader.epoch(epoch))
            for i, image in zip(loader.sample_ids(epoch, batch), images, strict=True)
        }

    one, other, later = samples(2), samples(2, batch_size=7), samples(3)
    shared = one.keys() & other.keys()
    assert len(shared) >= 20
    assert all(torch.equal(one[i], other[i]) for i in shared)
    assert not any(torch.equal(one[i], later[i]) for i in one.keys() & later.keys())


def test_every_image_once_and_the_last_evaluation_batch_padded(make_root):
    data = build(make_root(train=7, val=3))
    assert (data.num_classes, data.class_names) == (3, ["a", "b", "c"])
    assert (data.train.num_samples, data.train.batches_per_epoch) == (21, 5)
    assert (data.val.num_samples, data.val.batches_per_epoch) == (9, 3)
    ids = [i for batch in range(5) for i in data.train.sample_ids(0, batch)]
    assert len(ids) == len(set(ids)) == 20
    images, targets = (torch.cat(parts) for parts in zip(*data.val.epoch(0), strict=True))
    assert images.shape == (12, 3, SIDE, SIDE) and images.dtype == torch.float32
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, -100, -100, -100]
    assert not images[9:].any()


def test_samples_are_named_by_their_paths(make_root):
    root = make_root()
    assert build(root).val.describe([0, 4]) == [str(root / "val" / "a" / "0.jpg"), str(root / "val" / "b" / "1.png")]


def test_mixup_is_for_training_alone(make_root):
    data = build(make_root(), mixup={"off_epoch": 1})
    _, soft = next(data.train.epoch(0))
    assert soft.shape == (4, 3)
    torch.testing.assert_close(soft.sum(1), torch.ones(4))
    assert next(data.train.epoch(1))[1].max(1).values.min() == 1
    assert next(data.val.epoch(0))[1].dtype == torch.int64


def test_evaluation_alone_needs_no_training_set(make_root):
    root = make_root()
    shutil.rmtree(root / "train")
    data = build(root, train=False)
    assert data.train is None and data.val.num_samples == 9 and data.num_classes == 3


def rgb(red, green, blue):
    return Image.new("RGB", (32, 32), (red, green, blue))


def palette():
    image = rgb(200, 100, 50).quantize(4)
    image.info["transparency"] = bytes([255, 0, 0, 0])
    return image


MODES = {
    "rgb.png": (rgb(200, 100, 50), (200, 100, 50)),
    "rgb.jpg": (rgb(200, 100, 50), (200, 100, 50)),
    "rgba.png": (rgb(200, 100, 50).convert("RGBA"), (200, 100, 50)),
    "palette.png": (palette(), (200, 100, 50)),
    "grey.png": (Image.new("L", (32, 32), 90), (90, 90, 90)),
    "grey.jpg": (Image.new("L", (32, 32), 90), (90, 90, 90)),
    "grey_alpha.png": (Image.new("LA", (32, 32), (90, 255)), (90, 90, 90)),
    "bilevel.png": (Image.new("1", (32, 32), 1), (255, 255, 255)),
    "grey16.png": (Image.fromarray(np.full((32, 32), 90 * 256, dtype=np.uint16)), (90, 90, 90)),
    "cmyk.jpg": (rgb(200, 100, 50).convert("CMYK"), (200, 100, 50)),
}


@pytest.mark.parametrize("name", MODES)
def test_colour_modes(name, make_root):
    image, colour = MODES[name]
    root = make_root(val=1)
    image.save(root / "val" / "a" / name)
    loader = build(root, mean=[0, 0, 0], std=[1, 1, 1]).val
    row = [path.endswith(name) for path in loader.describe([0, 1])].index(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images, targets = next(loader.epoch(0))
    assert targets[row] == 0 and loader.bad_images == {}
    expected = torch.tensor(colour).view(3, 1, 1).expand(3, SIDE, SIDE) / 255
    torch.testing.assert_close(images[row], expected, atol=4 / 255, rtol=0)  # JPEG rounds


def test_pixels_are_normalised(make_root):
    root = make_root(val=1)
    rgb(255, 0, 128).save(root / "val" / "a" / "0.png")
    (root / "val" / "a" / "0.jpg").unlink()
    images, _ = next(build(root, mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 0.2]).val.epoch(0))
    expected = torch.tensor([0.9 / 0.5, -0.2 / 0.25, (128 / 255 - 0.3) / 0.2])
    torch.testing.assert_close(images[0].mean((1, 2)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_warnings_of_pillow_go_to_the_log_once(num_workers, make_root, caplog):
    root = make_root(val=1)
    palette().save(root / "val" / "c" / "palette.png")
    loader = build(root, num_workers=num_workers).val
    for epoch in range(2):
        list(loader.epoch(epoch))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert str(root / "val" / "c" / "palette.png") in messages[0] and "transparency" in messages[0].lower()


def test_warnings_of_others_are_not_the_image_s(make_root, monkeypatch):
    """What another thread warns of meanwhile, say while it writes a checkpoint, is recorded here too."""
    path = str(make_root(val=1) / "val" / "a" / "0.jpg")
    real = Image.open
    monkeypatch.setattr(imagefolder.Image, "open", lambda file: warnings.warn("of another", stacklevel=1) or real(file))
    assert imagefolder.read_rgb(path)[1] == []


def png_without_its_end() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (36, 36, 3), dtype=np.uint8)).save(buffer, "png")
    return buffer.getvalue()[:1000]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_corrupt_images_become_padding(num_workers, make_root, caplog):
    root = make_root(train=4, val=4)
    bad = {name: str(root / "val" / name) for name in ("a/0.jpg", "a/1.png", "b/1.png", "c/2.jpg", "c/3.png")}
    truncate(root / "val" / "a" / "0.jpg")
    (root / "val" / "a" / "1.png").write_text("this is no image")
    (root / "val" / "b" / "1.png").write_bytes(png_without_its_end())
    (root / "val" / "c" / "2.jpg").write_bytes(b"")
    Image.new("F", (32, 32), 0.5).save(root / "val" / "c" / "3.png", "tiff")
    loader = build(root, num_workers=num_workers, check_images=0).val
    for epoch in range(2):
        images, targets = (torch.cat(parts) for parts in zip(*loader.epoch(epoch), strict=True))
        assert targets.tolist() == [-100, -100, 0, 0, 1, -100, 1, 1, 2, 2, -100, -100]
        assert [bool(image.any()) for image in images] == [target >= 0 for target in targets]
    assert loader.bad_images.keys() == set(bad.values())
    assert "truncated" in loader.bad_images[bad["a/0.jpg"]]
    assert loader.bad_images[bad["a/1.png"]] == loader.bad_images[bad["c/2.jpg"]]
    assert "32 bits" in loader.bad_images[bad["c/3.png"]]
    logged = [record.getMessage() for record in caplog.records if record.name == "vitkernels.data.imagefolder"]
    assert len(logged) == len(caplog.records) == 5
    assert all(sum(path in message for message in logged) == 1 for path in bad.values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_too_many_corrupt_images_stop_the_run(num_workers, make_root):
    root = make_root(train=4)
    bad = [root / "train" / name for name in ("a/0.jpg", "b/2.jpg")]
    for path in bad:
        truncate(path)
    loader = build(root, num_workers=num_workers, max_bad_share=0.0).train  # one is always allowed
    with pytest.raises(BadImagesError, match=r"2 of 12 images could not be read.*data\.max_bad_share") as stop:
        list(loader.epoch(0))
    assert all(f"{path}: OSError: " in str(stop.value) for path in bad)


def test_a_file_that_vanishes_is_a_bad_image(make_root):
    root = make_root()
    loader = build(root).val
    (root / "val" / "b" / "1.png").unlink()
    list(loader.epoch(0))
    assert "FileNotFoundError" in loader.bad_images[str(root / "val" / "b" / "1.png")]


def test_a_corrupt_image_leaves_its_mixup_partner_unmixed(make_root):
    root = make_root()
    truncate(root / "train" / "b" / "2.jpg")
    plain, mixed = (build(root, batch_size=20, mixup=mixup).train for mixup in (None, {"mode": "pair"}))
    epoch = next(e for e in range(9) if str(root / "train" / "b" / "2.jpg") in plain.describe(plain.sample_ids(e, 0)))
    (images, targets), (mixed_images, soft) = next(plain.epoch(epoch)), next(mixed.epoch(epoch))
    row = targets.tolist().index(-100)
    assert not mixed_images[row].any() and not soft[row].any()
    torch.testing.assert_close(mixed_images[19 - row], images[19 - row])
    assert soft[19 - row, targets[19 - row]] == 1


def test_tiny_images_survive_the_recipe(make_root):
    data = build(make_root(size=(2, 1)), **RECIPE)
    for epoch in range(5):
        assert all((targets >= 0).all() for _, targets in data.train.epoch(epoch))
    assert len(list(data.val.epoch(0))) == 3


@pytest.mark.parametrize("auto_augment", ["rand-m10-inc1", "original", "augmix-m3", "3a"])
def test_strong_augmentation_runs(auto_augment, make_root):
    loader = build(make_root(), auto_augment=auto_augment).train
    assert all(torch.isfinite(images).all() for epoch in range(4) for images, _ in loader.epoch(epoch))


def test_posterize_to_nothing_is_black():
    options = {"mean": [0.5] * 3, "std": [0.5] * 3, "scale": [1, 1], "ratio": [1, 1], "hflip": 0.0, "re_prob": 0.0}
    options |= {"interpolation": "bicubic", "color_jitter": None, "re_mode": "const", "re_count": 1}
    transform = train_transform(SIDE, auto_augment="rand-m10-inc1", **options)
    ops = {op.name: op for step in transform.transforms for op in getattr(step, "ops", ())}
    ops["PosterizeIncreasing"].prob = 1.0
    assert ops["PosterizeIncreasing"](rgb(200, 100, 50)).getextrema() == ((0, 0),) * 3


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_posterize_is_pillows(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).convert(mode)
    for bits in range(1, 9):
        assert _posterize(image, bits).tobytes() == ImageOps.posterize(image, bits).tobytes()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"in_chans": 1}, "in_chans=1.*needs in_chans=3"),
        ({"mean": [0.5]}, r"data\.mean=\[0\.5\].*three values"),
        ({"mean": "grey"}, r"data\.mean=grey.*three values"),
        ({"crop_mode": "centre"}, r"unknown data\.crop_mode 'centre'.*Did you mean 'center'"),
        ({"std": [0.2, 0, 0.2]}, r"data\.std=\[0\.2, 0, 0\.2\].*above 0"),
        ({"scale": [0.5]}, r"data\.scale=\[0\.5\]: expected \[least, greatest\]"),
        ({"ratio": "wide"}, r"data\.ratio=wide"),
        ({"hflip": 2}, r"data\.hflip=2: expected a number from 0 to 1"),
        ({"crop_pct": "abc"}, r"data\.crop_pct=abc"),
        ({"interpolation": 3}, r"unknown data\.interpolation '3'"),
        ({"interpolation": "cubic"}, r"unknown data\.interpolation 'cubic'.*Did you mean.*'bicubic'"),
        ({"auto_augment": "rnd-m9"}, r"data\.auto_augment='rnd-m9'.*rand-m9-mstd0\.5-inc1"),
        ({"re_prob": 0.1, "re_mode": "noise"}, r"data\.re_mode='noise'"),
        ({"crop_pct": 1.5}, r"data\.crop_pct=1\.5"),
        ({"batch_size": 22}, r"data\.batch_size=22 is more than the 21 images"),
        ({"batch_size": 5, "mixup": {}}, r"data\.batch_size=5 is odd"),
        ({"small_images": "ignore"}, r"unknown data\.small_images 'ignore'; known: error, upscale"),
    ],
)
def test_values_that_cannot_work(kwargs, message, make_root):
    with pytest.raises(UsageError, match=message):
        build(make_root(), **kwargs)


def test_nothing_is_logged_about_a_sound_folder(make_root, caplog):
    caplog.set_level(logging.INFO)
    data = build(make_root())
    for loader in (data.train, data.val):
        list(loader.epoch(0))
    assert [record.levelname for record in caplog.records] == ["INFO", "INFO"]  # the two header checks
