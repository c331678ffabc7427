"""data=table: tables of several labels and of shares, and training on them."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from expecting import error
from finished_batches import finished_epoch

from vitkernels.data import table
from vitkernels.data.target_table import read_table


def write(path, rows) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text(rows)
    return path


LABELS = [{"path": "1.jpg", "targets": ["dog", "cat"]}, {"path": "2.jpg", "targets": []}]
LABELS += [{"path": "3.jpg", "targets": ["dog"]}]
SHARES = [{"path": "1.jpg", "targets": [0.25, 0.75]}, {"path": "2.jpg", "targets": [1.0, 0.0]}]


@pytest.mark.parametrize("suffix", [".json", ".jsonl", ".parquet"])
def test_read_table__labels(tmp_path, suffix):
    found = read_table(write(tmp_path / f"t{suffix}", LABELS), None)
    assert found.paths == ["1.jpg", "2.jpg", "3.jpg"] and found.classes == ["cat", "dog"]
    assert found.targets.tolist() == [[1, 1], [0, 0], [0, 1]] and found.targets.dtype == np.float32
    assert not found.are_shares and found.splits is None


@pytest.mark.parametrize("suffix", [".json", ".parquet"])
def test_read_table__shares(tmp_path, suffix):
    found = read_table(write(tmp_path / f"t{suffix}", SHARES), None)
    assert (found.targets.tolist(), found.classes, found.are_shares) == ([[0.25, 0.75], [1, 0]], None, True)


@pytest.mark.parametrize("lists", [
    [[0.25, 0.75], [1, 0]], [[1, 0], [0, 1], [0.5, 0.5]], [[0, 1.0], [1, 0]], [[1, 0, 0], [0, 0.5, 0.5]],
], ids=str)  # fmt: skip
def test_read_table__integers_among_fractions_are_numbers_per_class(tmp_path, lists):
    rows = [{"path": f"{number}.jpg", "targets": each} for number, each in enumerate(lists)]
    found = read_table(write(tmp_path / "t.json", rows), None)
    assert (found.targets.tolist(), found.classes, found.are_shares) == (lists, None, True)


def test_read_table__a_label_among_fractions_is_refused(tmp_path):
    rows = [{"path": "1", "targets": [0.25, 0.75]}, {"path": "2", "targets": [1]}]
    with error("data.table", row=2, value=1):
        read_table(write(tmp_path / "t.json", rows), None)
    rows[1]["targets"] = [0, 2]
    with error("data.table", row=2, value=2.0):
        read_table(write(tmp_path / "t.json", rows), None)


@pytest.mark.parametrize("text, targets, classes", [
    ("path,targets\n1.jpg,dog; cat\n2.jpg,\n", [[1, 1], [0, 0]], ["cat", "dog"]),
    ("path,targets\n1.jpg,2;0\n2.jpg,1\n", [[1, 0, 1], [0, 1, 0]], None),
    ("path,targets\n1.jpg,m²;²\n2.jpg,²\n", [[1, 1], [0, 1]], ["m²", "²"]),  # a digit that int() refuses
    ("path,dog,cat\n1.jpg,0.5,1\n2.jpg,0,0\n", [[0.5, 1], [0, 0]], ["dog", "cat"]),
])  # fmt: skip
def test_read_table__csv(tmp_path, text, targets, classes):
    found = read_table(write(tmp_path / "t.csv", text), None)
    assert (found.targets.tolist(), found.classes, found.are_shares) == (targets, classes, False)


def test_read_table__single_labels_remain_lists_of_labels(tmp_path):
    assert not read_table(write(tmp_path / "t.csv", "path,targets\n1.jpg,a\n2.jpg,b\n"), None).are_shares
    rows = [{"path": "1", "targets": {"a": 0.3, "b": 0.7}}, {"path": "2", "targets": {"b": 1}}]
    found = read_table(write(tmp_path / "t.json", rows), None)
    assert found.are_shares and found.targets.tolist() == [[pytest.approx(0.3), pytest.approx(0.7)], [0, 1]]


@pytest.mark.parametrize("text, fields", [
    ("file,targets\n1.jpg,a\n", {}), ("path\n1.jpg\n", {}), ("path,targets\n", {}),
    ("path,a,b\n1.jpg,0,2\n", {"row": 1, "value": "2"}), ("path,a,b\n1.jpg,0,1\n2.jpg,x,1\n", {"row": 2, "value": "x"}),
    ("path,targets\n1.jpg,a;1\n", {"value": 1}), ("path,split,a,b\n1.jpg,test,0,1\n", {"row": 1, "value": "test"}),
    ("path,a,b\n1.jpg,nan,1\n", {"row": 1, "value": "nan"}),
    ("path,targets\n1.jpg,a,b\n2.jpg,b\n", {"row": 1}), ("path,a,b\n1.jpg,0,1\n2.jpg,1\n", {"row": 2}),
    (f"path,targets\n1.jpg,{'a' * 140000}\n", {}),
])  # fmt: skip
def test_read_table__refuses_invalid_tables(tmp_path, text, fields):
    with error("data.table", **fields):
        read_table(write(tmp_path / "t.csv", text), None)


@pytest.mark.parametrize("second, fields", [
    ({"path": "2"}, {"row": 2}), ({"targets": ["a"]}, {"row": 2}),
    ({"path": "2", "targets": [0, 1, 1]}, {"row": 2, "value": [0, 1, 1]}),
])  # fmt: skip
def test_read_table__refuses_rows_without_a_column_and_integers_that_may_be_labels_or_targets(tmp_path, second, fields):
    with error("data.table", **fields):
        read_table(write(tmp_path / "t.jsonl", [{"path": "1", "targets": ["a"]}, second]), None)


def test_read_table__refuses_classes_that_the_first_row_lacks(tmp_path):
    with error("data.table", row=2, value="b"):
        read_table(write(tmp_path / "t.json", [{"path": "1", "a": 1}, {"path": "2", "b": 1}]), None)
    rows = [{"path": str(n), "targets": [1.0] * n} for n in (2, 2, 3)]
    with error("data.table", row=3, value=3):
        read_table(write(tmp_path / "t.json", rows), None)


def test_read_table__refuses_other_files_and_class_counts(tmp_path):
    with error("data.table"):
        read_table(write(tmp_path / "t.txt", ""), None)
    with error("data.table"):
        read_table(tmp_path / "missing.csv", None)
    with error("data.num_classes", num_classes=3, largest=3):
        read_table(write(tmp_path / "t.csv", "path,targets\n1.jpg,3\n"), 3)
    assert read_table(tmp_path / "t.csv", 5).targets.shape == (1, 5)


# ---- as a data set ----


@pytest.fixture
def images(make_root):
    """Images a/0, a/1, … of two classes, and a table in which every third has both labels."""
    root = make_root(train=6, val=2, classes="ab")
    rows = []
    for path in sorted(root.rglob("*.*")):
        names = ["a", "b"] if len(rows) % 3 == 0 else [path.parent.name]
        rows.append({"path": str(path.relative_to(root)), "split": path.parts[-3], "targets": names})
    write(root / "labels.json", rows)
    return root


def build(path, **kwargs):
    given = {"image_size": 24, "in_chans": 3, "seed": 0, "batch_size": 4, "num_workers": 0}
    return table.build(**given | {"table": str(path)} | kwargs)


def test_table__labels_of_training_and_evaluation(images):
    data = build(images / "labels.json")
    assert (data.targets, data.num_classes, data.class_names) == ("labels", 2, ["a", "b"])
    assert (data.train.num_samples, data.val.num_samples) == (12, 4)
    rows = {row["path"]: row["targets"] for row in json.loads((images / "labels.json").read_text())}
    for loader in (data.train, data.val):
        for number, (_, targets) in enumerate(finished_epoch(loader, 0)):
            names = [name.removeprefix(f"{images}/") for name in loader.describe(loader.sample_ids(0, number))]
            assert targets.tolist() == [[float(c in rows[name]) for c in "ab"] for name in names]


def test_table__rows_without_a_sample_are_negative_and_black(images):
    (images / "val" / "a" / "0.jpg").write_bytes(b"no image")
    pixels, targets = next(finished_epoch(build(images / "labels.json", batch_size=6).val, 0))
    missing = [0, 4, 5]
    assert targets[missing].tolist() == [[-100, -100]] * 3 and not pixels[missing].any()
    assert (targets[[1, 2, 3]] >= 0).all()


def test_table__mixup_mixes_targets_as_images(images):
    (images / "train" / "a" / "0.jpg").write_bytes(b"no image")
    plain, mixed = (
        list(finished_epoch(build(images / "labels.json", hflip=0.0, scale=[1, 1], max_bad_share=1, **kwargs).train, 0))
        for kwargs in ({}, {"mixup": {"mixup_alpha": 0.8, "cutmix_alpha": 0.0}})
    )
    for (images_, targets), (mixed_images, mixed_targets) in zip(plain, mixed, strict=True):
        for row in range(4):
            partner = 3 - row
            if targets[row, 0] < 0:
                assert (mixed_targets[row] == -100).all() and not mixed_images[row].any()
                continue
            other = row if targets[partner, 0] < 0 else partner
            spread = images_[row] - images_[other]
            share = ((mixed_images[row] - images_[other]) * spread).sum() / (spread**2).sum() if spread.any() else 1.0
            expected = targets[row] * share + targets[other] * (1 - share)
            torch.testing.assert_close(mixed_targets[row], expected, rtol=1e-4, atol=1e-4)  # share by least squares


def test_table__distributions_are_evaluated_by_the_most_likely_class(images):
    rows = json.loads((images / "labels.json").read_text())
    for number, row in enumerate(rows):
        row["targets"] = [0.2, 0.8] if number % 2 else [0.9, 0.1]
    data = build(write(images / "shares.json", rows))
    assert data.targets == "distributions"
    assert next(finished_epoch(data.train, 0))[1].dtype == torch.float32
    targets = next(finished_epoch(data.val, 0))[1]
    assert targets.dtype == torch.int64 and set(targets.tolist()) == {0, 1}


def test_table__val_share_is_stable_and_excludes_a_split(images):
    rows = [{k: v for k, v in row.items() if k != "split"} for row in json.loads((images / "labels.json").read_text())]
    path = write(images / "plain.json", rows)

    def val(chosen):
        loader = build(write(images / "chosen.json", chosen), val_share=0.4, batch_size=2).val
        return {name.removeprefix(f"{images}/") for name in loader.describe(list(range(loader.num_samples)))}

    assert 0 < len(val(rows)) < 16
    assert val(rows[5:]) == val(rows) & {row["path"] for row in rows[5:]}
    for given, share in ((path, None), (images / "labels.json", 0.2)):
        with error("data.val_share"):
            build(given, val_share=share)


def test_table__refuses_images_that_do_not_exist_and_empty_splits(images):
    rows = json.loads((images / "labels.json").read_text())
    with error("data.table", row=2, value="gone.jpg"):
        build(write(images / "t.json", [rows[0], {**rows[1], "path": "gone.jpg"}, *rows[2:]]))
    with error("data.table", value="val"):
        build(write(images / "t.json", [{**row, "split": "train"} for row in rows]))
    with error("data.table", path=None):
        build(images, table=None)
