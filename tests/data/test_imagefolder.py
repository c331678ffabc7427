"""Training and evaluation on image folders: exact resume, color modes, corrupt files."""

import errno
import io
import logging
import os
import shutil
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch
from PIL import Image, ImageOps

from vitkernels.data import BadImagesError, SourceError, imagefolder, shared_memory
from vitkernels.data.augment import TrainAugmentation, _posterize
from vitkernels.data.decode.pillow import PillowImage
from vitkernels.data.decode.pillow_warnings import collected

SIDE = 24
RECIPE = {"auto_augment": "rand-m9-mstd0.5-inc1", "re_prob": 0.5, "color_jitter": 0.4, "interpolation": "random"}


def build(root, **kwargs):
    defaults = {"image_size": SIDE, "in_chans": 3, "seed": 0, "batch_size": 4, "max_bad_share": 0.5}
    return imagefolder.build(root=str(root), **defaults | kwargs)


def truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_imagefolder__resume_within_an_epoch_is_exact(num_workers, make_root, same, rng_state):
    root = make_root()
    truncate(root / "train" / "b" / "2.jpg")
    recipe = RECIPE | {"mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}}
    full = list(finished_epoch(build(root, **recipe).train, 1))
    before = rng_state()
    data = build(root, num_workers=num_workers, **recipe)
    next(finished_epoch(data.train, 0))  # abandoned in the middle
    assert same(finished_epoch(data.train, 1, start=3), full[3:])
    assert same(finished_epoch(data.train, 1), full)
    assert same(finished_epoch(data.val, 0), finished_epoch(build(root).val, 7))
    assert rng_state() == before


def test_imagefolder__differs_by_epoch_and_seed(make_root, same):
    root = make_root()
    batches = [next(finished_epoch(build(root, seed=seed).train, epoch)) for seed in (0, 1) for epoch in (0, 1)]
    assert not any(same([a], [b]) for i, a in enumerate(batches) for b in batches[:i])


def test_imagefolder__sample_depends_on_seed_epoch_and_index_alone(make_root):
    root = make_root()

    def samples(epoch, **kwargs):
        loader = build(root, **RECIPE | kwargs).train
        return {
            i: image
            for batch, (images, _) in enumerate(finished_epoch(loader, epoch))
            for i, image in zip(loader.sample_ids(epoch, batch), images, strict=True)
        }

    one, other, later = samples(2), samples(2, batch_size=7), samples(3)
    shared = one.keys() & other.keys()
    assert len(shared) >= 20
    assert all(torch.equal(one[i], other[i]) for i in shared)
    assert not any(torch.equal(one[i], later[i]) for i in one.keys() & later.keys())


def test_imagefolder__every_image_once_with_a_padded_last_evaluation_batch(make_root):
    data = build(make_root(train=7, val=3))
    assert (data.num_classes, data.class_names) == (3, ["a", "b", "c"])
    assert (data.train.num_samples, data.train.batches_per_epoch) == (21, 5)
    assert (data.val.num_samples, data.val.batches_per_epoch) == (9, 3)
    ids = [i for batch in range(5) for i in data.train.sample_ids(0, batch)]
    assert len(ids) == len(set(ids)) == 20
    images, targets = (torch.cat(parts) for parts in zip(*finished_epoch(data.val, 0), strict=True))
    assert images.shape == (12, 3, SIDE, SIDE) and images.dtype == torch.float32
    assert targets.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, -100, -100, -100]
    assert not images[9:].any()


def test_imagefolder__workers_fill_shared_memory_that_the_loader_need_not_copy(make_root, monkeypatch):
    batches = build(make_root()).train._batches
    alone = batches[0, 1][0]["pixels"]
    monkeypatch.setattr(shared_memory, "get_worker_info", lambda: "of a worker")
    shared = batches[0, 1][0]["pixels"]
    assert shared.is_shared() and not alone.is_shared() and torch.equal(shared, alone)


def test_imagefolder__names_samples_by_path(make_root):
    root = make_root()
    assert build(root).val.describe([0, 4]) == [str(root / "val" / "a" / "0.jpg"), str(root / "val" / "b" / "1.png")]


def test_imagefolder__mixup_for_training_only(make_root):
    data = build(make_root(), mixup={"off_epoch": 1})
    _, soft = next(finished_epoch(data.train, 0))
    assert soft.shape == (4, 3)
    torch.testing.assert_close(soft.sum(1), torch.ones(4))
    assert next(finished_epoch(data.train, 1))[1].max(1).values.min() == 1
    assert next(finished_epoch(data.val, 0))[1].dtype == torch.int64


def test_imagefolder__evaluation_needs_no_training_set(make_root):
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
@pytest.mark.parametrize("decode", ["pillow", "turbo"])
def test_decode__color_modes(name, decode, make_root):
    image, color = MODES[name]
    root = make_root(val=1)
    image.save(root / "val" / "a" / name)
    loader = build(root, mean=[0, 0, 0], std=[1, 1, 1], decode=decode).val
    row = [path.endswith(name) for path in loader.describe([0, 1])].index(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        images, targets = next(finished_epoch(loader, 0))
    assert targets[row] == 0 and loader.bad_images == {}
    expected = torch.tensor(color).view(3, 1, 1).expand(3, SIDE, SIDE) / 255
    torch.testing.assert_close(images[row], expected, atol=4 / 255, rtol=0)  # JPEG rounds


def test_imagefolder__normalizes_pixels(make_root):
    root = make_root(val=1)
    rgb(255, 0, 128).save(root / "val" / "a" / "0.png")
    (root / "val" / "a" / "0.jpg").unlink()
    images, _ = next(finished_epoch(build(root, mean=[0.1, 0.2, 0.3], std=[0.5, 0.25, 0.2]).val, 0))
    expected = torch.tensor([0.9 / 0.5, -0.2 / 0.25, (128 / 255 - 0.3) / 0.2])
    torch.testing.assert_close(images[0].mean((1, 2)), expected)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_pillow_warnings__are_logged_once(num_workers, make_root, caplog):
    root = make_root(val=1)
    palette().save(root / "val" / "c" / "palette.png")
    loader = build(root, num_workers=num_workers).val
    for epoch in range(2):
        list(finished_epoch(loader, epoch))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert str(root / "val" / "c" / "palette.png") in messages[0] and "transparency" in messages[0].lower()


def test_pillow__gives_each_thread_the_warnings_of_its_image(make_root, monkeypatch):
    data = (make_root(val=1) / "val" / "a" / "0.jpg").read_bytes()
    real, filters, show = Image.open, [*warnings.filters], warnings.showwarning
    opened, proceed = [threading.Event(), threading.Event()], [threading.Event(), threading.Event()]
    numbers = iter(range(2))

    def open_late(file):
        number = next(numbers)
        opened[number].set()
        assert proceed[number].wait(20)
        warnings.warn_explicit(f"of image {number}", UserWarning, "Image.py", 1, module="PIL.Image")
        return real(file)

    monkeypatch.setattr(Image, "open", open_late)
    with ThreadPoolExecutor(2) as threads:
        images = []
        for number in range(2):  # the second thread begins before the first one ends
            images.append(threads.submit(PillowImage, data))
            assert opened[number].wait(20)
        with pytest.raises(UserWarning, match="of other code"):  # as pytest's filters say
            warnings.warn("of other code", stacklevel=1)
        for number, image in enumerate(images):  # and it ends after the first one
            proceed[number].set()
            assert image.result(20).warnings == [f"of image {number}"]
    assert [*warnings.filters] == filters and warnings.showwarning is show


def test_pillow__collects_a_warning_though_other_code_has_replaced_the_filters(make_root, monkeypatch):
    data = (make_root(val=1) / "val" / "a" / "0.jpg").read_bytes()
    real = Image.open

    def warn(file):
        warnings.warn_explicit("of the image", UserWarning, "Image.py", 1, module="PIL.Image")
        return real(file)

    monkeypatch.setattr(Image, "open", warn)
    with collected(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert PillowImage(data).warnings == ["of the image"]


def png_without_its_end() -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (36, 36, 3), dtype=np.uint8)).save(buffer, "png")
    return buffer.getvalue()[:1000]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_corrupt_images__become_padding(num_workers, make_root, caplog):
    root = make_root(train=4, val=4)
    bad = {name: str(root / "val" / name) for name in ("a/0.jpg", "a/1.png", "b/1.png", "c/2.jpg", "c/3.png")}
    truncate(root / "val" / "a" / "0.jpg")
    (root / "val" / "a" / "1.png").write_text("not an image")
    (root / "val" / "b" / "1.png").write_bytes(png_without_its_end())
    (root / "val" / "c" / "2.jpg").write_bytes(b"")
    Image.new("F", (32, 32), 0.5).save(root / "val" / "c" / "3.png", "tiff")
    loader = build(root, num_workers=num_workers, check_images=0).val
    for epoch in range(2):
        images, targets = (torch.cat(parts) for parts in zip(*finished_epoch(loader, epoch), strict=True))
        assert targets.tolist() == [-100, -100, 0, 0, 1, -100, 1, 1, 2, 2, -100, -100]
        assert [bool(image.any()) for image in images] == [target >= 0 for target in targets]
    assert loader.bad_images.keys() == set(bad.values())
    assert "truncated" in loader.bad_images[bad["a/0.jpg"]]
    assert loader.bad_images[bad["a/1.png"]] == loader.bad_images[bad["c/2.jpg"]]
    assert "32-bit" in loader.bad_images[bad["c/3.png"]]
    logged = [record.getMessage() for record in caplog.records if record.name == "vitkernels.data.imagefolder"]
    assert len(logged) == len(caplog.records) == 5
    assert all(sum(path in message for message in logged) == 1 for path in bad.values())


@pytest.mark.parametrize("num_workers", [0, 2])
def test_corrupt_images__raise_beyond_the_limit(num_workers, make_root):
    root = make_root(train=4)
    bad = [root / "train" / name for name in ("a/0.jpg", "b/2.jpg")]
    for path in bad:
        truncate(path)
    loader = build(root, num_workers=num_workers, max_bad_share=0.0).train  # one is always allowed
    with error("data.bad_images", BadImagesError, num_samples=12, allowed=1) as stop:
        list(finished_epoch(loader, 0))
    assert all(f"{path}: OSError: " in str(stop.value) for path in bad)


def test_vanished_file__is_a_bad_image(make_root):
    root = make_root()
    loader = build(root).val
    (root / "val" / "b" / "1.png").unlink()
    list(finished_epoch(loader, 0))
    assert "FileNotFoundError" in loader.bad_images[str(root / "val" / "b" / "1.png")]


def failing(monkeypatch, path: Path, number: int, times: int) -> list[int]:
    """Let the system fail with this error number at the first reads of a file; return a list of one count of reads."""
    reads = [0]

    def opened(name, mode):
        if name == str(path):
            reads[0] += 1
            if reads[0] <= times:
                raise OSError(number, os.strerror(number))
        return open(name, mode)

    monkeypatch.setattr("vitkernels.data.folder.open", opened, raising=False)
    monkeypatch.setattr("vitkernels.data.image_source._PAUSES", (0.0, 0.0))
    return reads


def test_read_error__of_the_system_is_retried(make_root, monkeypatch, same):
    loader = build(root := make_root(), check_images=0).val
    expected = list(finished_epoch(loader, 0))
    reads = failing(monkeypatch, root / "val" / "b" / "1.png", errno.ESTALE, 2)
    assert same(finished_epoch(loader, 0), expected) and reads == [3] and not loader.bad_images


def test_read_error__of_the_system_that_lasts_ends_training(make_root, monkeypatch):
    path = make_root() / "val" / "b" / "1.png"
    reads = failing(monkeypatch, path, errno.EIO, 99)
    with pytest.raises(SourceError, match=r"Input/output error.*resume") as stop:
        list(build(path.parents[2], check_images=0).val.epoch(0))
    assert stop.value.code == "data.read" and stop.value.fields["path"] == str(path) and reads == [3]


def test_read_error__of_permission_is_of_one_image(make_root, monkeypatch):
    path = make_root() / "val" / "b" / "1.png"
    reads = failing(monkeypatch, path, errno.EACCES, 99)
    loader = build(path.parents[2], check_images=0).val
    list(loader.epoch(0))
    assert "PermissionError" in loader.bad_images[str(path)] and reads == [1]


def test_corrupt_image__leaves_its_mixup_partner_unmixed(make_root):
    root = make_root()
    truncate(root / "train" / "b" / "2.jpg")
    plain, mixed = (build(root, batch_size=20, mixup=mixup).train for mixup in (None, {"mode": "pair"}))
    epoch = next(e for e in range(9) if str(root / "train" / "b" / "2.jpg") in plain.describe(plain.sample_ids(e, 0)))
    (images, targets), (mixed_images, soft) = next(finished_epoch(plain, epoch)), next(finished_epoch(mixed, epoch))
    row = targets.tolist().index(-100)
    assert not mixed_images[row].any() and not soft[row].any()
    torch.testing.assert_close(mixed_images[19 - row], images[19 - row])
    assert soft[19 - row, targets[19 - row]] == 1


def test_tiny_images__pass_all_augmentations(make_root):
    data = build(make_root(size=(2, 1)), **RECIPE)
    for epoch in range(5):
        assert all((targets >= 0).all() for _, targets in finished_epoch(data.train, epoch))
    assert len(list(finished_epoch(data.val, 0))) == 3


@pytest.mark.parametrize("settings", [
    {"color_jitter": [0.4, 0.3, 0]}, {"color_jitter": (0.4, 0.3, 0.2, 0)},
    {"color_jitter": [0.4, 0.3, 0.2, 0.1], "auto_augment": "3a"},  # the worker jitters hue
], ids=str)  # fmt: skip
def test_color_jitter__accepts_a_strength_each(settings, make_root):
    assert all(torch.isfinite(images).all() for images, _ in finished_epoch(build(make_root(), **settings).train, 0))


@pytest.mark.parametrize("auto_augment", ["rand-m10-inc1", "original", "augmix-m3", "3a"])
def test_auto_augment__gives_finite_images(auto_augment, make_root):
    loader = build(make_root(), auto_augment=auto_augment).train
    assert all(torch.isfinite(images).all() for epoch in range(4) for images, _ in finished_epoch(loader, epoch))


def test_posterize__to_0_bits_is_black():
    options = {"mean": [0.5] * 3, "scale": [1, 1], "ratio": [1, 1], "hflip": 0.0, "re_prob": 0.0}
    options |= {"interpolation": "bicubic", "color_jitter": None, "re_mode": "const", "re_count": 1}
    augmentation = TrainAugmentation(SIDE, auto_augment="rand-m10-inc1", **options)
    ops = {op.name: op for step in augmentation.worker_steps for op in getattr(step, "ops", ())}
    ops["PosterizeIncreasing"].prob = 1.0
    assert ops["PosterizeIncreasing"](rgb(200, 100, 50)).getextrema() == ((0, 0),) * 3


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_posterize__matches_pillow(mode):
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)).convert(mode)
    for bits in range(1, 9):
        assert _posterize(image, bits).tobytes() == ImageOps.posterize(image, bits).tobytes()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("scale", [0.5]),
        ("scale", [0.5, 2]),
        ("ratio", "wide"),
        ("hflip", 2),
        ("crop_pct", "abc"),
        ("crop_pct", 1.5),
        ("check_images", 0.5),
        ("max_bad_share", 2),
        ("color_jitter", -1),
        ("color_jitter", "x"),
        ("color_jitter", [0.4, 0.4]),
        ("color_jitter", [0.4, 0.4, None]),
    ],
)
def test_imagefolder__refuses_invalid_values(setting, value, make_root):
    with error("data.value", setting=setting, value=value):
        build(make_root(), **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value"),
    [("crop_mode", "centre"), ("interpolation", 3), ("interpolation", "cubic"), ("small_images", "ignore")],
)
def test_imagefolder__refuses_unknown_names(setting, value, make_root):
    with error("unknown_name", name=str(value)) as refused:
        build(make_root(), **{setting: value})
    assert refused.value.fields["kind"] == setting


@pytest.mark.parametrize(
    ("kwargs", "code", "fields"),
    [
        ({"in_chans": 1}, "data.in_chans", {"in_chans": 1}),
        ({"mean": [0.5]}, "data.value", {"setting": "mean", "value": [0.5]}),
        ({"mean": "grey"}, "data.value", {"setting": "mean", "value": "grey"}),
        ({"std": 0.2}, "data.value", {"setting": "std", "value": 0.2}),
        ({"std": [0.2, 0, 0.2]}, "data.value", {"setting": "std", "value": [0.2, 0, 0.2]}),
        ({"auto_augment": "rand-zz"}, "data.augmentation", {"section": "zz"}),
        ({"auto_augment": "rand-m9-x2"}, "data.augmentation", {"section": "x2"}),
        ({"auto_augment": "original-m9"}, "data.augmentation", {"section": "m9"}),
        ({"auto_augment": "rnd-m9"}, "data.augmentation", {"auto_augment": "rnd-m9"}),
        ({"re_prob": 0.1, "re_mode": "noise"}, "data.augmentation", {"re_mode": "noise"}),
        ({"color_jitter": [0.4, 0, 0, 0.1]}, "data.augmentation", {"color_jitter": [0.4, 0, 0, 0.1]}),
        ({"batch_size": 22}, "data.batch_size", {"batch_size": 22, "num_samples": 21}),
        ({"batch_size": 5, "mixup": {}}, "data.mixup", {"batch_size": 5}),
    ],
)
def test_imagefolder__refuses_settings_that_cannot_work(kwargs, code, fields, make_root):
    with error(code, **fields):
        build(make_root(), **kwargs)


def test_decoder_fallbacks__are_logged_once_and_counted(make_root, caplog):
    caplog.set_level(logging.INFO)
    loader = build(make_root(train=4), decode="turbo").val
    for epoch in range(2):
        list(loader.epoch(epoch))
    assert loader.fallbacks == {"not a JPEG file": 6}  # 3 of the 9 images are PNG files, in two epochs
    assert sum("not a JPEG file" in record.getMessage() for record in caplog.records) == 2


def test_imagefolder__logs_nothing_else_about_a_valid_folder(make_root, caplog):
    caplog.set_level(logging.INFO)
    data = build(make_root())
    for loader in (data.train, data.val):
        list(finished_epoch(loader, 0))
    assert [record.levelname for record in caplog.records] == ["INFO"] * 6  # header checks, decoder fallbacks
