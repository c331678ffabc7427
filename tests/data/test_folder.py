"""What is said about an image folder before training starts."""

import logging
import re
import shutil

import pytest

from vitkernels.data import imagefolder
from vitkernels.errors import UsageError


def build(root, **kwargs):
    return imagefolder.build(**{"image_size": 24, "in_chans": 3, "seed": 0, "batch_size": 2, "root": root} | kwargs)


def message_of(root, **kwargs) -> str:
    with pytest.raises(UsageError) as error:
        build(str(root) if root else root, **kwargs)
    message = str(error.value)
    assert "\n" not in message
    return message


def test_no_root():
    assert re.search(r"data\.root is not set: .*data\.root=PATH.*ROOT/train/<class>", message_of(None))


def test_missing_root(tmp_path):
    assert f"data.root={tmp_path / 'nowhere'} does not exist" in message_of(tmp_path / "nowhere")


def test_root_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    assert f"data.root={tmp_path / 'file'} is not a folder" in message_of(tmp_path / "file")


@pytest.mark.parametrize("split", ["train", "val"])
def test_missing_split(split, make_root):
    root = make_root()
    (root / split).rename(root / "other")
    message = message_of(root)
    there = "other, val" if split == "train" else "other, train"
    assert message.startswith(f"data.root={root} has no {split}/ folder (it holds: {there})")


def test_both_splits_missing(tmp_path):
    assert "has no train/ folder and no val/ folder (it holds: nothing)" in message_of(tmp_path)


@pytest.mark.parametrize("split", ["train", "val"])
def test_images_without_class_folders(split, make_root):
    root = make_root()
    shutil.rmtree(root / split)
    (root / split).mkdir()
    (root / split / "0.jpg").touch()
    assert message_of(root).startswith(f"{root / split} has no class folders: move each image")


def test_one_class(make_root):
    root = make_root(classes="a")
    assert f"{root / 'train'} has only one class folder, 'a'" in message_of(root)


def test_empty_class_folders_are_all_named(make_root):
    root = make_root()
    for name in ("empty", "void"):
        (root / "val" / name).mkdir()
        (root / "train" / name).mkdir()
    (root / "train" / "void" / "notes.txt").touch()
    message = message_of(root)
    assert f"{root / 'train'} has class folders without images: 'empty', 'void'. Fill or remove them" in message
    assert ".png" in message


def test_classes_of_the_splits_differ(make_root):
    root = make_root(classes="abcd")
    shutil.rmtree(root / "train" / "b")
    shutil.rmtree(root / "val" / "c")
    message = message_of(root)
    assert f"only in {root / 'train'}: 'c'; only in {root / 'val'}: 'b'" in message


def test_home_and_relative_paths(make_root, monkeypatch):
    root = make_root()
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.chdir(root.parent)
    for short in ("~/images", "images", root):
        assert build(short).val.describe([0]) == [str(root / "val" / "a" / "0.jpg")]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_small_images_are_enlarged_with_one_warning(make_root, caplog):
    root = make_root(val=2, size=(30, 23))
    build(root, image_size=23)
    assert warnings_of(caplog) == []
    loader = build(root).val
    (val,) = (message for message in warnings_of(caplog) if str(root / "val") in message)
    assert "6 of 6 checked images are smaller than image_size=24, the smallest 30×23 (" in val and "enlarged" in val
    assert len(warnings_of(caplog)) == 2  # train and val
    images, targets = next(loader.epoch(0))
    assert images.shape[2:] == (24, 24) and (targets >= 0).all()


def test_small_images_can_be_refused(make_root):
    root = make_root(size=(30, 23))
    (root / "train" / "b" / "0.jpg").unlink()
    message = message_of(root, small_images="error")
    assert message.startswith(f"{root / 'train'}: 20 of 20 checked images are smaller than image_size=24, the smallest")
    assert "data.small_images=upscale" in message


def test_unreadable_headers_are_counted(make_root, caplog):
    root = make_root(val=2)
    (root / "val" / "b" / "0.jpg").write_bytes(b"")
    (root / "val" / "b" / "1.png").write_text("no image")
    data = build(root)
    path = root / "val" / "b" / "0.jpg"
    assert warnings_of(caplog) == [f"{root / 'val'}: 2 of 6 checked images cannot be read, such as {path}"]
    assert data.val.num_samples == 6  # they stay: reading decides


@pytest.mark.parametrize(("check_images", "checked"), [(None, 21), (20_000, 21), (4, 4), (0, 0)])
def test_the_log_says_how_many_headers_were_read(check_images, checked, make_root, caplog):
    caplog.set_level(logging.INFO, logger="vitkernels.data.imagefolder")
    root = make_root(train=7)
    build(root, check_images=check_images)
    assert f"{root / 'train'}: checked the headers of {checked} of 21 images" in caplog.messages


def test_checked_images_are_spread_evenly(make_root, caplog):
    """Of 21 images in order, 3 evenly spaced ones are the first, the middle and the last."""
    root = make_root(train=7)
    for name in ("a/0.jpg", "b/3.png", "c/6.jpg"):
        (root / "train" / name).write_bytes(b"")
    build(root, check_images=3)
    assert "3 of 3 checked images cannot be read" in warnings_of(caplog)[0]
