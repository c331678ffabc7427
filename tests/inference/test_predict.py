"""predict and embed: files to classes and features, with unreadable files named."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from expecting import error
from PIL import Image

from vitkernels.cli.main import main as console
from vitkernels.inference import open_trained
from vitkernels.inference.contact_sheet import contact_sheet
from vitkernels.inference.images import find_images, read_batches
from vitkernels.inference.run_model import ModelOnFiles
from vitkernels.runtime import create

LENGTH = ("trainer.max_steps=3",)


@pytest.fixture
def run(trained_run):
    return trained_run(*LENGTH)


@pytest.fixture
def pictures(digit_files, tmp_path):
    """Five digits in a folder and its subfolder, a file that is not an image, and a text file."""
    folder = tmp_path / "pictures"
    (folder / "sub").mkdir(parents=True)
    for i in range(5):
        shutil.copy(digit_files.folder / f"{i:03d}.png", folder / ("sub" if i > 2 else "") / f"{i}.png")
    (folder / "broken.png").write_text("no image")
    (folder / "notes.txt").write_text("not listed")
    return folder


def test_find_images__folders_and_their_subfolders_in_order(pictures):
    names = [path.removeprefix(f"{pictures}/") for path in find_images([pictures])]
    assert names == ["0.png", "1.png", "2.png", "broken.png", "sub/3.png", "sub/4.png"]


def test_find_images__refuses_a_missing_path_and_a_folder_without_images(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with error("inference.no_images", path=str(path)):
            list(find_images([path]))


@pytest.mark.parametrize("batch_size", [1, 2, 4, 64])
def test_read_batches__every_file_once_and_in_order(batch_size, run, pictures):
    trained = open_trained(run)
    batches = list(read_batches(find_images([pictures]), trained.transform(), 1, batch_size))
    files = [file for batch in batches for file in batch.files]
    assert [file[-5:] for file in files] == [f"{i}.png" for i in range(5)]
    assert [len(batch.files) == len(batch.images) <= batch_size for batch in batches] == [True] * len(batches)
    assert [file for batch in batches for file in batch.unreadable] == [str(pictures / "broken.png")]


def test_read_batches__reads_ahead_no_more_than_some_batches(run, digit_files):
    """A folder of any size: files are found while earlier ones are read."""
    found = []

    def files():
        for file in find_images([digit_files.folder]):
            found.append(file)
            yield file

    batches = read_batches(files(), open_trained(run).transform(), 1, 4)
    next(batches)
    assert len(found) <= 16 < len(digit_files.targets)
    batches.close()


@pytest.mark.slow
def test_predict__has_the_accuracy_of_the_run(trained_run, digit_files):
    """The files are enlarged by Pillow, in training by torch: a tenth of the images may differ in their first class."""
    run = trained_run("trainer.max_epochs=4", "schedule.warmup_epochs=1", "optim.lr=0.005")
    predictions = list(
        ModelOnFiles(open_trained(run), runtime=create("cpu")).predict(find_images([digit_files.folder]))
    )
    right = [digit_files.targets[each.file] == each.classes[0][0] for each in predictions]
    top1 = 100 * sum(right) / len(right)
    best = json.loads((run / "summary.json").read_text())["best"]["top1"]
    assert len(right) == 360
    assert best > 30, "10 % are right by chance"
    assert top1 > best - 10


def test_predict__probabilities_are_those_of_the_model(run, digit_files):
    trained, file = open_trained(run), str(digit_files.folder / "000.png")
    (found,) = ModelOnFiles(trained, runtime=create("cpu")).predict([file], top=10)
    with torch.no_grad(), Image.open(file) as image:
        expected = trained.build()(trained.transform()(image)[None]).softmax(-1)[0]
    assert [share for _, share in found.classes] == pytest.approx(sorted(expected.tolist(), reverse=True))
    assert sum(share for _, share in found.classes) == pytest.approx(1)


def test_predict_command__writes_json_csv_and_a_contact_sheet(run, pictures, tmp_path, capsys):
    words = ["predict", str(run), str(pictures), "--runtime", "cpu", "--top", "2"]
    sheet = tmp_path / "sheets" / "a.png"
    assert console([*words, "--format", "json", "--out", str(tmp_path / "a.json"), "--sheet", str(sheet)]) == 0
    rows = json.loads((tmp_path / "a.json").read_text())
    assert [row["file"][-5:] for row in rows if "error" not in row] == [f"{i}.png" for i in range(5)]
    assert [len(row["predictions"]) for row in rows[:5]] == [2] * 5 and rows[5]["file"].endswith("broken.png")
    with Image.open(sheet) as picture:
        assert picture.width > 144 * 5
    assert "1 of 6 files could not be read" in capsys.readouterr().err
    assert console([*words, "--format", "csv", "--out", str(tmp_path / "a.csv")]) == 0
    with open(tmp_path / "a.csv") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines[:5], rows[:5], strict=True):
        assert line["class_1"] == row["predictions"][0]["class"]
        assert float(line["confidence_2"]) == row["predictions"][1]["confidence"]
    assert lines[5]["error"] and not lines[5]["class_1"]


@pytest.mark.parametrize("kind", ["json", "csv"])
def test_predict_command__that_fails_midway_keeps_the_earlier_file(kind, run, pictures, tmp_path, monkeypatch):
    def failing(self, files, top):
        yield from list(real(self, files, top))[:2]
        raise RuntimeError("lost the device")

    real = ModelOnFiles.predict
    monkeypatch.setattr(ModelOnFiles, "predict", failing)
    out = tmp_path / "out" / "a"
    out.parent.mkdir()
    out.write_text("earlier")
    with pytest.raises(RuntimeError, match="lost the device"):
        console(["predict", str(run), str(pictures), "--runtime", "cpu", "--format", kind, "--out", str(out)])
    assert [path.name for path in out.parent.iterdir()] == ["a"] and out.read_text() == "earlier"


def test_contact_sheet__letters_of_other_languages_have_their_own_shapes(tmp_path):
    """A font without a letter draws the same box for each."""
    drawn = []
    for letter in "Äßéñжλ":
        contact_sheet([(Image.new("RGB", (8, 8)), [letter])], tmp_path / "sheet.png")
        drawn.append((tmp_path / "sheet.png").read_bytes())
    assert len(set(drawn)) == len(drawn)


def test_predict_command__prints_a_table(run, pictures, capsys):
    assert console(["predict", str(run / "export"), str(pictures), "--runtime", "cpu"]) == 0
    text = capsys.readouterr().out
    assert all(f"{pictures}/{i}.png" in text for i in range(3)) and "%" in text


def test_predict_command__fails_if_no_file_can_be_read(run, pictures, capsys):
    assert console(["predict", str(run), str(pictures / "broken.png"), "--runtime", "cpu"]) == 1
    assert console(["predict", str(run), str(pictures / "missing.png"), "--runtime", "cpu"]) == 2
    assert "missing.png" in capsys.readouterr().err


def test_embed_command__writes_features_by_file(run, pictures, tmp_path):
    for name in ("a.npz", "a.parquet"):
        if name.endswith("parquet"):
            pytest.importorskip("pyarrow", reason="needs vitkernels[shards]")
        assert console(["embed", str(run), str(pictures), "--runtime", "cpu", "--out", str(tmp_path / name)]) == 0
    stored = np.load(tmp_path / "a.npz")
    assert stored["features"].shape == (5, 32) and stored["files"][0] == str(pictures / "0.png")
    trained = open_trained(run)
    model = trained.build()
    with torch.no_grad(), Image.open(pictures / "sub" / "4.png") as picture:
        image = trained.transform()(picture)[None]
        logits = model.head(torch.from_numpy(stored["features"][4])[None])
        torch.testing.assert_close(logits, model(image), atol=1e-5, rtol=1e-5)
    from pyarrow import parquet

    table = parquet.read_table(tmp_path / "a.parquet").to_pydict()
    assert table["file"] == list(stored["files"])
    np.testing.assert_array_equal(np.array(table["features"], np.float32), stored["features"])


def test_embed_command__refuses_an_unknown_suffix(run, pictures, tmp_path, capsys):
    assert console(["embed", str(run), str(pictures), "--runtime", "cpu", "--out", str(tmp_path / "a.txt")]) == 2
    assert ".npz" in capsys.readouterr().err
