"""Checks of an image folder before training starts."""

import errno
import logging
import os
import shutil

import pytest
from expecting import error
from finished_batches import finished_epoch

from vitkernels.data import imagefolder
from vitkernels.training.log_file import LogFile


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


def test_classes__error_lists_all_empty_ones(make_root):
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


def test_root__accepts_home_and_relative_paths(make_root, monkeypatch):
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
    data = build(root, max_bad_share=0.5)
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
    build(root, check_images=3, max_bad_share=0.1)
    assert "3 of 3 checked images" in warnings_of(caplog)[0]


@pytest.mark.parametrize("target", ["..", "../b", "../.."])
def test_links__to_other_classes_are_refused(target, make_root):
    root = make_root()
    (root / "train" / "a" / "loop").symlink_to(target)
    with error("data.links", path=str(root / "train" / "a" / "loop"), class_name="a"):
        build(str(root))


def test_links__between_class_folders_are_refused(make_root):
    root = make_root()
    (root / "train" / "d").symlink_to("a")
    with error("data.links"):
        build(str(root))


def test_links__within_a_class_are_skipped_and_outside_ones_followed_once(make_root, tmp_path, caplog):
    root = make_root(train=2)
    (root / "train" / "a" / "loop").symlink_to(".")
    outside = tmp_path / "outside"
    shutil.copytree(root / "train" / "a", outside, symlinks=True)
    for name in ("x", "y"):
        (root / "train" / "a" / name).symlink_to(outside)
    loader = build(str(root)).train
    assert loader.num_samples == 6 + 2
    assert sum("skipped" in line for line in warnings_of(caplog)) == 3  # loop, outside/loop, and x or y
    assert sum("its images count" in line for line in warnings_of(caplog)) == 1


def test_other_files__are_counted_in_one_line(make_root, caplog):
    caplog.set_level(logging.INFO)
    root = make_root()
    for name in ("a/1.txt", "a/2.txt", "b/README"):
        (root / "train" / name).touch()
    build(str(root))
    (line,) = (message for message in caplog.messages if "ignored" in message)
    assert line.startswith(f"{root / 'train'}: ignored 3 files") and "2 .txt" in line and "1 without suffix" in line


def names_of(loader) -> set[str]:
    return set(loader.describe(range(loader.num_samples)))


def test_other_files__macos_metadata_and_pipes_are_not_images(make_root, caplog):
    root = make_root(train=2)
    for image in (root / "train").glob("*/*"):
        image.with_name(f"._{image.name}").write_bytes(b"metadata")
    os.mkfifo(root / "train" / "a" / "pipe.jpg")  # reading it would never end
    with caplog.at_level(logging.INFO):
        data = build(str(root), max_bad_share=0)
    assert data.train.num_samples == 6 and len(list(finished_epoch(data.train, 0))) == 3
    (line,) = [record.message for record in caplog.records if "ignored" in record.message]
    assert "6 ._*" in line and "1 .jpg (not a regular file)" in line


def test_hidden_folders__are_neither_classes_nor_parts_of_one(make_root, caplog):
    root = make_root(train=2)
    plain = build(str(root))
    shutil.copytree(root / "train" / "a", root / "train" / ".ipynb_checkpoints")
    shutil.copytree(root / "train" / "b", root / "train" / "a" / ".thumbnails")
    with caplog.at_level(logging.INFO):
        data = build(str(root))
    assert data.class_names == plain.class_names and data.train.num_samples == plain.train.num_samples
    skipped = [record.message for record in caplog.records if "skipped hidden folders" in record.message]
    assert [message.rpartition(": ")[2] for message in skipped] == [".ipynb_checkpoints", "a/.thumbnails"]


def test_only_train__names_the_folder_to_split(make_root):
    root = make_root()
    shutil.rmtree(root / "val")
    with error("data.splits", missing=["val"]) as caught:
        build(str(root))
    assert f"root={root / 'train'} with val_share" in str(caught.value)
    with error("data.val_share", found=["train"]) as caught:
        build(str(root), val_share=0.1)
    assert f"set root={root / 'train'}" in str(caught.value)


def test_headers__more_unreadable_images_than_allowed_end_the_run(make_root):
    root = make_root(train=4)
    for image in sorted((root / "train").glob("*/*"))[:2]:
        image.write_bytes(b"no image")
    with error("data.bad_images", unreadable=2, allowed=1):
        build(str(root))
    build(str(root), max_bad_share=0.2)


def test_unlistable_folder__is_named_in_the_error(make_root, monkeypatch):
    root, scandir = make_root(), os.scandir

    def refusing(path):
        if str(path).endswith("locked"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scandir(path)

    (root / "train" / "b" / "locked").mkdir()
    monkeypatch.setattr(os, "scandir", refusing)
    with error("data.folder", path=str(root / "train" / "b" / "locked")):
        build(str(root))
    (root / "train").rename(root / "locked")
    (root / "train").symlink_to(root / "locked")
    monkeypatch.setattr(os, "scandir", lambda path: refusing(f"{path}locked"))
    with error("data.folder", path=str(root / "train")):
        build(str(root))


def test_non_utf_8_names__train_as_files_and_are_refused_as_classes(make_root, monkeypatch, tmp_path):
    root = make_root(train=4)
    name = os.fsdecode(b"m\xe9d.jpg")
    (root / "train" / "a" / name).write_bytes(b"no image")
    logger, file = logging.getLogger("vitkernels"), LogFile(str(tmp_path / "log"))
    # pytest-xdist cannot send a report whose captured log has such a name, so pytest does not see these records.
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [file])
    data = build(str(root), max_bad_share=1)
    list(data.train.epoch(0))
    file.close()
    assert name in next(iter(data.train.bad_images))
    assert "m\\udce9d.jpg" in (tmp_path / "log").read_text()
    for split in ("train", "val"):
        shutil.copytree(root / split / "a", root / split / os.fsdecode(b"m\xe9d"))
    with error("data.class_name", class_name=os.fsdecode(b"m\xe9d")):
        build(str(root))


def test_val_share__splits_each_class_and_is_stable_as_files_are_added(make_root):
    root = make_root(train=40) / "train"
    before = build(str(root), val_share=0.25)
    train, val = names_of(before.train), names_of(before.val)
    assert not train & val and len(train | val) == 120 and before.class_names == ["a", "b", "c"]
    assert all(2 <= sum(f"/{name}/" in path for path in val) <= 20 for name in "abc")
    for i in range(20):
        shutil.copy(root / "a" / "0.jpg", root / "a" / f"new{i}.jpg")
    after = build(str(root), val_share=0.25)
    assert train <= names_of(after.train) and val <= names_of(after.val)
    assert build(str(root), val_share=0.25, train=False).train is None


def test_val_share__small_classes_have_images_in_both_splits(make_root):
    root = make_root(train=2) / "train"
    for share in (0.01, 0.99):
        data = build(str(root), val_share=share)
        assert (data.train.num_samples, data.val.num_samples) == (3, 3)


def test_val_share__refuses_a_split_folder_and_a_class_of_one_image(make_root):
    root = make_root(train=1)
    with error("data.val_share", found=["train", "val"]):
        build(str(root), val_share=0.1)
    with error("data.val_share", class_name="a"):
        build(str(root / "train"), val_share=0.1)
