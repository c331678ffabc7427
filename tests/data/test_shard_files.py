"""data=shards: tar and Parquet files, their cached index, and what makes them unusable."""

import errno
import json
import logging
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch
from shard_fixtures import build, encoded, samples, write_parquet, write_tar, write_tars

from vitkernels.data import Shard, SourceError, imagefolder
from vitkernels.data.shard_files.contract import Fields
from vitkernels.data.shard_files.index import cached_index
from vitkernels.data.shard_files.listing import expand_ranges
from vitkernels.data.shard_files.order import shard_sequence, windowed_order
from vitkernels.data.shard_files.parquet import index_parquet
from vitkernels.data.shard_files.tar import index_tar


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


# ---- reading ----


def stored(path, found):
    with open(path, "rb") as file:
        return [os.pread(file.fileno(), n, at) for at, n in zip(found.offsets, found.lengths, strict=True)]


def test_index_tar__points_to_each_image(tmp_path):
    members = [("a/1.jpg", b"one"), ("a/1.cls", b"2\n"), ("a/2.json", b'{"label": 7}'), ("a/2.PNG", b"three")]
    members += [("a/2.cls", b"0"), ("readme", b"x"), ("a/.hidden.jpg", b"y")]
    path = write_tar(tmp_path / "0.tar", members)
    found = index_tar(str(path), Fields())
    assert (found.names, found.targets.tolist()) == (["a/1", "a/2"], [2, 0])
    assert stored(path, found) == [b"one", b"three"]


def test_index_tar__reads_labels_of_json_members_and_names_of_classes(tmp_path):
    members = [("1.jpg", b"one"), ("1.json", b'{"species": "cat"}')]
    path = write_tar(tmp_path / "0.tar", members)
    found = index_tar(str(path), Fields(label="json.species", classes=("dog", "cat")))
    assert found.targets.tolist() == [1]
    with error("data.shard_label", label="cat"):
        index_tar(str(path), Fields(label="json.species"))
    with error("data.shard_fields"):
        index_tar(str(path), Fields(label="json.other"))


def test_index_tar__reads_digits_as_class_numbers_even_if_class_names_are_digits(tmp_path):
    labels = [b"0", b"1", b"2", b"02"]
    members = [m for i, label in enumerate(labels) for m in ((f"{i}.jpg", b"x"), (f"{i}.cls", label))]
    path = write_tar(tmp_path / "0.tar", members)
    found = index_tar(str(path), Fields(classes=("02", "1", "10", "2")))
    assert found.targets.tolist() == [0, 1, 2, 0]


def test_index_tar__accepts_long_and_non_ascii_names(tmp_path):
    name = "d" * 120 + "/ünï"
    path = write_tar(tmp_path / "0.tar", [(f"{name}.jpg", b"one"), (f"{name}.cls", b"1")])
    assert index_tar(str(path), Fields()).names == [name]


@pytest.mark.parametrize("members, found", [
    ([("1.jpg", b"x")], ["jpg"]),
    ([("1.jpg", b"x"), ("1.json", b"{}")], ["jpg", "json"]),
    ([("1.jpg", b"x"), ("1.cls", b"0"), ("2.txt", b""), ("1.txt", b"")], ["1"]),
    ([("1.txt", b"x")], ["txt"]),
])  # fmt: skip
def test_index_tar__refuses_files_without_complete_samples(tmp_path, members, found):
    path = write_tar(tmp_path / "0.tar", members)
    with error("data.shard_fields", found=found):
        index_tar(str(path), Fields())


@pytest.mark.parametrize("label", [b"-1", b"cat", b"", b"1.5"])
def test_index_tar__refuses_invalid_labels(tmp_path, label):
    path = write_tar(tmp_path / "0.tar", [("1.jpg", b"x"), ("1.cls", label)])
    with error("data.shard_label", where=f"{path}: 1"):
        index_tar(str(path), Fields())


def test_index_tar__names_a_truncated_file_wherever_it_ends(tmp_path):
    path = write_tar(tmp_path / "0.tar", [("1.jpg", b"x" * 700), ("1.cls", b"0"), ("2.jpg", b"y"), ("2.cls", b"1")])
    whole = path.read_bytes()
    end = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    assert len(index_tar(str(path), Fields()).names) == 2
    for size in range(0, end + 511, 100):
        path.write_bytes(whole[:size])
        with error("data.shard_truncated" if size >= 512 else "data.shard_unreadable", path=str(path)):
            index_tar(str(path), Fields())


def test_index_tar__names_a_damaged_file(tmp_path):
    path = write_tar(tmp_path / "0.tar", [("1.jpg", b"x"), ("1.cls", b"0"), ("2.jpg", b"y"), ("2.cls", b"1")])
    content = bytearray(path.read_bytes())
    content[1024 + 100] ^= 1
    path.write_bytes(content)
    with error("data.shard_unreadable", path=str(path)):
        index_tar(str(path), Fields())


@pytest.mark.parametrize("options", [
    {}, {"use_dictionary": False}, {"data_page_size": 4000}, {"data_page_version": "2.0"},
    {"column_encoding": {"image.bytes": "DELTA_LENGTH_BYTE_ARRAY"}, "use_dictionary": False},
    {"compression": {"label": "zstd"}},
], ids=str)  # fmt: skip
def test_index_parquet__points_to_each_image(tmp_path, options):
    numbers = [0, 1, 2, 3, 1, 4, 5, 6, 6, 7, 8, 9, 10]  # some twice
    path = write_parquet(tmp_path / "0.parquet", numbers, **options)
    found = index_parquet(str(path), Fields())
    assert stored(path, found) == [encoded(n) for n in numbers]
    assert found.targets.tolist() == [n % 3 for n in numbers]


def test_index_parquet__refuses_compressed_images_and_accepts_the_rewritten_file(tmp_path):
    images = [letter * 500 for letter in (b"a", b"b", b"c")]  # page headers repeat the least and the greatest
    table = pa.table({"image": images, "label": [0, 1, 2]})
    path, new = str(tmp_path / "0.parquet"), str(tmp_path / "1.parquet")
    pq.write_table(table, path, compression="zstd")
    with error("data.shard_compressed", path=path, column="image"):
        index_parquet(path, Fields())
    pq.write_table(pq.read_table(path), new, compression="none")
    assert stored(new, index_parquet(new, Fields())) == images


def test_index_parquet__refuses_unusable_files(tmp_path):
    path = str(write_parquet(tmp_path / "0.parquet", range(3)))
    for fields in (Fields(image="img"), Fields(label="fine_label")):
        with error("data.shard_fields", found=["image", "label"]):
            index_parquet(path, fields)
    with error("data.shard_label"):
        index_parquet(str(write_parquet(tmp_path / "1.parquet", [0], pa.array([-1]))), Fields())
    content = (tmp_path / "0.parquet").read_bytes()
    (tmp_path / "2.parquet").write_bytes(content[:-100])
    with error("data.shard_truncated", path=str(tmp_path / "2.parquet")):
        index_parquet(str(tmp_path / "2.parquet"), Fields())
    (tmp_path / "3.parquet").write_bytes(b"no")
    with error("data.shard_unreadable", path=str(tmp_path / "3.parquet")):
        index_parquet(str(tmp_path / "3.parquet"), Fields())


# ---- as a data set ----


def test_shards__equal_an_image_folder_bit_for_bit(make_root, tmp_path, same):
    """The same files in the same order, as a folder, as tar files and as Parquet files."""
    root = make_root(train=7, val=3)
    kwargs = {"image_size": 24, "in_chans": 3, "seed": 5, "batch_size": 4, "auto_augment": "rand-m9-mstd0.5"}
    kwargs |= {"re_prob": 0.5, "mixup": {"mixup_alpha": 0.8}, "color_jitter": 0.4}
    folder = imagefolder.build(root=str(root), **kwargs)
    for split in ("train", "val"):
        files = sorted((root / split).rglob("*.*"))
        members = []
        for number, file in enumerate(files):
            members += [(f"{number:04d}{file.suffix}", file.read_bytes())]
            members += [(f"{number:04d}.cls", str("abc".index(file.parent.name)).encode())]
        for shard, first in enumerate(range(0, len(members), 10)):
            write_tar(tmp_path / "tars" / f"{split}-{shard}.tar", members[first : first + 10])
    data = build(tmp_path / "tars", **kwargs)
    assert data.num_classes == 3 and data.class_names is None
    assert same(finished_epoch(data.train, 1), finished_epoch(folder.train, 1))
    assert same(finished_epoch(data.val, 0), finished_epoch(folder.val, 0))


def test_shards__of_parquet_files_have_the_class_names_of_the_hub(tmp_path):
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", range(5))
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", range(5, 10))
    write_parquet(tmp_path / "data/validation-00000-of-00001.parquet", range(10, 13))
    data = build(tmp_path)
    assert (data.train.num_samples, data.val.num_samples, data.class_names) == (10, 3, ["a", "b", "c"])
    assert [t for _, targets in finished_epoch(data.val, 0) for t in targets.tolist()] == [1, 2, 0, -100]
    assert data.train.describe([7]) == [f"{tmp_path}/data/train-00001-of-00002.parquet: 2"]


def test_shards__batches_do_not_depend_on_workers_or_start(tmp_path, same):
    root = write_tars(tmp_path / "s")
    one, other = build(root, window=8), build(root, window=8, num_workers=2)
    batches = list(finished_epoch(one.train, 2))
    assert len(batches) == 5 and same(batches, finished_epoch(other.train, 2))
    assert same(batches[3:], finished_epoch(build(root, window=8).train, 2, start=3))


def test_shards__two_processes_hold_the_batches_of_one(tmp_path):
    root = write_tars(tmp_path / "s")
    one = build(root, batch_size=4, window=8).train
    two = [build(root, batch_size=2, window=8, shard=Shard(rank, 2)).train for rank in range(2)]
    for (images, targets), *shares in zip(*(finished_epoch(t, 1, start=2) for t in (one, *two)), strict=True):
        for rank, (own, own_targets) in enumerate(shares):
            rows = Shard(rank, 2).rows(2)
            assert torch.equal(own, images[rows]) and torch.equal(own_targets, targets[rows])


def test_shards__class_names_and_counts(tmp_path):
    root = write_tars(tmp_path / "s")
    (root / "class_names.json").write_text(json.dumps(["x", "y", "z"]))
    assert build(root).class_names == ["x", "y", "z"]
    (root / "class_names.json").write_text(json.dumps(["x", "y"]))
    with error("data.num_classes", largest=2):
        build(root)
    (root / "class_names.json").write_text("{}")
    with error("data.class_names"):
        build(root)
    (root / "class_names.json").unlink()
    assert build(root, num_classes=10).num_classes == 10
    with error("data.num_classes", num_classes=2):
        build(root, num_classes=2)


def test_shards__unreadable_image_is_masked_and_named(tmp_path, caplog):
    root = write_tars(tmp_path / "s")
    write_tar(root / "val-00001.tar", [("bad.jpg", b"no image"), ("bad.cls", b"1")])
    val = build(root).val
    targets = torch.cat([targets for _, targets in finished_epoch(val, 0)])
    assert targets.tolist() == [0, 1, 2, 0, 1, 2, -100, -100]
    assert list(val.bad_images) == [f"{root}/val-00001.tar: bad"]


def test_shards__splits(tmp_path):
    root = write_tars(tmp_path / "s")
    assert build(root, train=False).train is None
    assert build(root, train_shards="train-{00001..00002}.tar").train.num_samples == 12
    with error("data.shards", split="train", found=["train-00004.tar", "train-00005.tar"]):
        build(root, train_shards="train-{00000..00005}.tar")
    with error("data.shards", split="val", pattern="test*"):
        build(root, val_shards="test*")
    with error("data.shard_splits", found=["val-00000.tar", "val-00001.tar"]):
        build(root, train_shards="*")
    (root / "val-00000.tar").rename(root / "val-00000.tar.gz")
    (root / "val-00001.tar").unlink()
    with error("data.shards", split="val"):
        build(root)


@pytest.mark.parametrize("kwargs, code", [
    ({"root": None}, "data.root"), ({"root": "/nowhere"}, "data.root"), ({"window": 0}, "data.value"),
    ({"num_classes": 1}, "data.value"),
])  # fmt: skip
def test_shards__refuse_impossible_values(tmp_path, kwargs, code):
    write_tars(tmp_path / "s")
    with error(code):
        build(**{"root": tmp_path / "s"} | kwargs)


def test_expand_ranges__counts_with_the_width_of_the_first_number():
    assert expand_ranges("a") == ["a"]
    assert expand_ranges("t-{08..11}.tar") == ["t-08.tar", "t-09.tar", "t-10.tar", "t-11.tar"]
    assert expand_ranges("{0..1}/{0..1}") == ["0/0", "0/1", "1/0", "1/1"]


# ---- the cached index ----


def test_index__is_built_once_and_updated_for_changed_shards(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="vitkernels.data.shard_files.index")
    root = write_tars(tmp_path / "s")

    def indexed():
        caplog.clear()
        data = build(root)
        return data, [record.getMessage().partition(" in ")[0] for record in caplog.records]

    assert indexed()[1] == ["indexed 21 images", "indexed 9 images"]
    assert indexed()[1] == []
    write_tar(root / "train-00004.tar", samples([50, 51]))
    data, said = indexed()
    assert data.train.num_samples == 23 and said == ["indexed 2 images"]
    write_tar(root / "train-00001.tar", samples([60]))
    data, said = indexed()
    assert data.train.num_samples == 18 and said[1:] == ["indexed 1 images"]
    assert said[0].startswith(f"{root}/train-00001.tar changed")
    assert data.train.describe([5, 6, 7]) == [
        f"{root}/train-00000.tar: 000005", f"{root}/train-00001.tar: 000060", f"{root}/train-00002.tar: 000012",
    ]  # fmt: skip


def test_read_error__is_retried_on_a_file_that_is_opened_again(tmp_path, monkeypatch, same):
    loader = build(write_tars(tmp_path / "s"), check_images=0).val
    expected = list(finished_epoch(loader, 0))
    stale, pread = loader._batches.samples.source.store.open(0), os.pread

    def read(descriptor, *place):
        if descriptor == stale.descriptor:
            raise OSError(errno.ESTALE, "Stale file handle")
        return pread(descriptor, *place)

    monkeypatch.setattr(os, "pread", read)
    monkeypatch.setattr("vitkernels.data.image_source._PAUSES", (0.0,))
    assert same(finished_epoch(loader, 0), expected)


def test_read_error__of_permission_concerns_the_shard(tmp_path, monkeypatch):
    root = write_tars(tmp_path / "s")
    loader = build(root, check_images=0).train

    def refused(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr("vitkernels.data.shard_files.store.OpenFile", refused)
    with pytest.raises(SourceError, match="Permission denied") as caught:
        list(loader.epoch(0))
    assert caught.value.code == "data.read" and caught.value.fields["path"].startswith(f"{root}/train-0000")


@pytest.mark.parametrize("workers", [0, 1])
def test_index__shard_that_changes_during_training_stops_it(tmp_path, workers):
    root = write_tars(tmp_path / "s")
    data = build(root, num_workers=workers, check_images=0)
    write_tar(root / "train-00001.tar", samples(range(70, 76)))
    with pytest.raises(SourceError) as caught:
        list(data.train.epoch(0))
    assert caught.value.code == "data.shard_changed"
    assert caught.value.fields["path"] == f"{root}/train-00001.tar"


def test_index__pickles_as_its_path(tmp_path):
    root = write_tars(tmp_path / "s")
    source = build(root).train._batches.samples.source
    text = pickle.dumps(source)
    assert len(text) < 1000
    again = pickle.loads(text)
    assert again.read(7) == source.read(7) and again.describe(20) == source.describe(20)
    write_tar(root / "train-00001.tar", samples([60]))
    build(root)
    with error("data.shard_changed"):
        pickle.loads(text)


def test_index__truncated_shard_is_named_and_the_others_stay_indexed(tmp_path):
    root = write_tars(tmp_path / "s")
    path = root / "train-00002.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:3000])
    with error("data.shard_truncated", path=str(path)):
        build(root)
    path.write_bytes(whole)
    assert build(root).train.num_samples == 21


@pytest.mark.slow
def test_index__opens_more_than_a_million_images_in_two_seconds(tmp_path):
    """1.3 M rows in 1300 shards, whose files are empty: opening reads no shard."""
    import time

    from vitkernels.data.shard_files.contract import ShardFile, ShardSamples
    from vitkernels.data.shard_files.index import write_index

    shards = [ShardFile(f"{n:05d}.tar", f"/{n:05d}.tar", 10**8, str(n)) for n in range(1300)]
    numbers = np.arange(1000)
    names = [f"n01440764/n01440764_{n:05d}" for n in range(1000)]
    write_index(tmp_path / "i", shards, [ShardSamples(numbers, numbers, numbers, names)] * 1300)
    begin = time.perf_counter()
    index = cached_index(tmp_path / "i", "/", shards, None)
    assert len(index) == 1_300_000 and index.name(1_299_999) == names[-1]
    assert time.perf_counter() - begin < 2


# ---- the order ----


def test_windowed_order__is_a_permutation_that_depends_on_the_draw_alone():
    starts = np.cumsum([0, 5, 9, 1, 12, 3])
    for window in (None, 1, 7, 30, 100):
        orders = [windowed_order(np.random.default_rng(seed), starts, window) for seed in (0, 0, 1)]
        assert sorted(orders[0]) == list(range(30))
        assert orders[0].tolist() == orders[1].tolist() != orders[2].tolist()


def test_shard_sequence__is_the_order_of_first_reads():
    assert shard_sequence(np.array([4, 0, 5, 1, 2, 3]), np.array([0, 2, 4, 6])) == [2, 0, 1]


def test_windowed_order__reads_few_shards_at_a_time():
    starts = np.arange(0, 1001, 50)
    order = windowed_order(np.random.default_rng(0), starts, 200)
    shards = order // 50
    for begin in range(0, 1000, 200):
        assert len(set(shards[begin : begin + 200])) <= 200 // 50 + 1
    batches = shards.reshape(-1, 20)
    share = np.mean([(batch[:, None] == batch).sum() - 20 for batch in batches]) / 20
    assert share == pytest.approx(19 * 49 / 199, rel=0.2)  # expected images of the same shard in a batch; 5 % deviation
