"""Checks of an image folder before training starts."""

import logging
import shutil

import pytest
from expecting import error
from finished_batches import finished_epoch

from vitkernels.data import imagefolder


def build(root, **kwargs):
    return imagefolder.build(**{"image_size": 24, "in_chans": 3, "seed": 0, "batch_size": 2, "root": root} | kwargs)


def test_root__unset():
    with error("data.root", root=None) as refused:
        build(None)
    expected = "root is not set: set it to the image folder; expected ROOT/train/<class>/<image>.jpg and "
    assert str(refused.value).startswith(expected)


def test_root__missing_or_a_file(tmp_path):
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with error("data.root", root=str(tmp_path / name)):
            build(str(tmp_path / name))


@pytest.mark.parametrize("split", ["train", "val"])
def test_root__without_a_split(split, make_root):
    root = make_root()
    (root / split).rename(root / "other")
    found = ["other", "val" if split == "train" else "train"]
    with error("data.splits", root=str(root), missing=[split], found=found):
        build(str(root))


def test_root__without_both_splits(tmp_path):
    with error("data.splits", missing=["train", "val"], found=[]):
        build(str(tmp_path))


@pytest.mark.parametrize("split", ["train", "val"])
def test_classes__images_without_class_folders(split, make_root):
    root = make_root()
    shutil.rmtree(root / split)
    (root / split).mkdir()
    (root / split / "0.jpg").touch()
    with error("data.no_classes", path=str(root / split)):
        build(str(root))


def test_classes__only_one(make_root):
    root = make_root(classes="a")
    with error("data.one_class", path=str(root / "train")):
        build(str(root))


def test_classes__empty_ones_are_all_named(make_root):
    root = make_root()
    for name in ("empty", "void"):
        (root / "val" / name).mkdir()
        (root / "train" / name).mkdir()
    (root / "train" / "void" / "notes.txt").touch()
    with error("data.empty_classes", path=str(root / "train"), classes=["empty", "void"]) as refused:
        build(str(root))
    assert ".png" in str(refused.value), "the suffixes that count as images"


def test_classes__differ_between_splits(make_root):
    root = make_root(classes="abcd")
    shutil.rmtree(root / "train" / "b")
    shutil.rmtree(root / "val" / "c")
    with error("data.classes_differ", only={str(root / "train"): ["c"], str(root / "val"): ["b"]}):
        build(str(root))


def test_root__takes_home_and_relative_paths(make_root, monkeypatch):
    root = make_root()
    monkeypatch.setenv("HOME", str(root.parent))
    monkeypatch.chdir(root.parent)
    for short in ("~/images", "images", root):
        assert build(short).val.describe([0]) == [str(root / "val" / "a" / "0.jpg")]


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_small_images__are_enlarged_with_one_warning(make_root, caplog):
    root = make_root(val=2, size=(30, 23))
    build(root, image_size=23)
    assert warnings_of(caplog) == []
    loader = build(root).val
    (val,) = (message for message in warnings_of(caplog) if str(root / "val") in message)
    assert "6 of 6 checked images are smaller than image_size=24, the smallest 30×23 (" in val and "enlarged" in val
    assert len(warnings_of(caplog)) == 2  # train and val
    images, targets = next(finished_epoch(loader, 0))
    assert images.shape[2:] == (24, 24) and (targets >= 0).all()


def test_small_images__can_be_refused(make_root):
    root = make_root(size=(30, 23))
    (root / "train" / "b" / "0.jpg").unlink()
    with error("data.small_images", path=str(root / "train"), small=20, checked=20):
        build(str(root), small_images="error")


def test_headers__unreadable_ones_are_counted(make_root, caplog):
    root = make_root(val=2)
    (root / "val" / "b" / "0.jpg").write_bytes(b"")
    (root / "val" / "b" / "1.png").write_text("no image")
    data = build(root)
    path = root / "val" / "b" / "0.jpg"
    assert warnings_of(caplog) == [f"{root / 'val'}: could not read 2 of 6 checked images, such as {path}"]
    assert data.val.num_samples == 6  # they count until reading fails


@pytest.mark.parametrize(("check_images", "checked"), [(None, 21), (20_000, 21), (4, 4), (0, 0)])
def test_headers__logs_how_many_were_read(check_images, checked, make_root, caplog):
    caplog.set_level(logging.INFO, logger="vitkernels.data.imagefolder")
    root = make_root(train=7)
    build(root, check_images=check_images)
    assert f"{root / 'train'}: checked the headers of {checked} of 21 images" in caplog.messages


def test_headers__are_evenly_spaced(make_root, caplog):
    """Of 21 images, 3 evenly spaced ones are the first, the middle and the last."""
    root = make_root(train=7)
    for name in ("a/0.jpg", "b/3.png", "c/6.jpg"):
        (root / "train" / name).write_bytes(b"")
    build(root, check_images=3)
    assert "3 of 3 checked images" in warnings_of(caplog)[0]
