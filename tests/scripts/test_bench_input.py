"""scripts/bench_input.py on a CPU: its table and rows."""

import itertools
import json
import runpy
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import forked
import pytest

from vitkernels.benchmarks import input as pipelines
from vitkernels.benchmarks.input import lengthen

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/bench_input.py"


def test_lengthen__links_every_image_once_before_repeating(tmp_path):
    folder = tmp_path / "train" / "c00"
    folder.mkdir(parents=True)
    for number in range(3):
        (folder / f"{number}.jpg").write_text(str(number))
    for count, names in ((2, 3), (5, 5), (5, 5), (8, 8)):
        lengthen(tmp_path, count)
        assert len(list(folder.iterdir())) == names
    links = sorted(image.stat().st_nlink for image in folder.glob("?.jpg"))
    assert links == [2, 3, 3] and (folder / "1_2.jpg").read_text() == "1"


def test_lengthen__needs_images(tmp_path):
    with pytest.raises(ValueError, match="holds no images"):
        lengthen(tmp_path, 4)


@pytest.fixture
def in_threads(monkeypatch):
    """Write JPEG files in threads, whose start takes no seconds."""
    monkeypatch.setattr(pipelines, "ProcessPoolExecutor", lambda mp_context: ThreadPoolExecutor(2))


def test_make_jpegs__interrupted_is_made_anew(tmp_path, in_threads, monkeypatch):
    write = pipelines._write_jpeg

    def interrupted(root, width, height, number):
        if number == 5:
            raise KeyboardInterrupt
        return write(root, width, height, number)

    monkeypatch.setattr(pipelines, "_write_jpeg", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pipelines.make_jpegs(tmp_path / "64x48", 12, 64, 48)
    assert not (tmp_path / "64x48").exists()
    monkeypatch.setattr(pipelines, "_write_jpeg", write)
    pipelines.make_jpegs(tmp_path / "64x48", 3, 64, 48)
    assert [path.name for path in tmp_path.iterdir()] == ["64x48"] and pipelines.count_jpegs(tmp_path / "64x48") == 3


def test_main__refuses_another_number_of_images(tmp_path, in_threads):
    pipelines.make_jpegs(tmp_path / "64x48", 12, 64, 48)
    lengthen(tmp_path / "64x48", 20)
    with pytest.raises(SystemExit, match="holds 12 images, not 13: pass --images 12, or delete"):
        runpy.run_path(str(SCRIPT))["main"](["--root", str(tmp_path), "--size", "64", "48", "--images", "13"])


@pytest.mark.parametrize(
    ("settings", "runs", "message"),
    [
        (["model=vit_b16_265"], [], "Did you mean 'vit_b16_256'"),
        (["model=vit_medium_patch16_reg4_gap_256"], [], "model=timm model.name=vit_medium_patch16_reg4_gap_256"),
        (["model.name=vit_b16_265"], [], "Setting: model.name=..."),
        (["model.img_size=250"], [], "Setting: model.img_size=..."),
        (["data.decode=turbo"], ["--runs", "files", "data=fake"], "data.decode"),  # only files have it
    ],
)
def test_main__checks_the_settings_before_it_makes_files(settings, runs, message, tmp_path, monkeypatch):

    def refuse(*_):
        raise AssertionError("files are made")

    monkeypatch.setattr(pipelines, "make_jpegs", refuse)
    folders = ["--root", str(tmp_path / "files"), "--results", str(tmp_path / "results.jsonl")]
    monkeypatch.setattr("sys.argv", ["bench_input.py", *folders, *runs, "--train", *settings])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    line = str(ended.value.code)  # sys.exit prints a string and exits with status 1
    assert line.startswith("error: ") and message in line and "\n" not in line
    assert list(tmp_path.iterdir()) == []


def test_rates__of_finished_rounds_survive_a_later_failure():
    def failing_after(batches):
        yield from itertools.repeat((None, range(8)), batches)
        raise RuntimeError("no image")

    lasting = partial(itertools.repeat, (None, range(8)))
    makers = {"a": lasting, "b": partial(failing_after, pipelines.queued_batches(0)), "c": lasting}
    rows = []
    with pytest.raises(RuntimeError, match="no image"):
        rows.extend(pipelines.rates(makers, 0.0, 2, 0))
    assert [(name, len(each)) for name, each in rows] == [("a", 2), ("b", 1), ("c", 1)]


@pytest.mark.slow
def test_main__measures_each_pipeline_and_training(tmp_path):
    words = "--loaders --images 60 --size 64 48 --side 32 --batch 8 --workers 0 --rounds 2 --seconds 0.1 --steps 4"
    arguments = [*words.split(), "--root", str(tmp_path), "--results", str(tmp_path / "rows.jsonl")]
    tiny = ["model.name=vit_tiny_patch16_224", "model.img_size=32", "+model.kwargs.depth=1", "runtime=cpu"]
    ran = forked.run([SCRIPT, *arguments, "--train", *tiny])
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert all(row["settings"] == tiny for row in rows)
    names = [row["pipeline"] for row in rows]
    assert names[-7:] == [
        "timm's create_loader", "training, data=fake", "training, files", "training, files, mixup, cutmix, erasing",
        "training, files, RandAugment", "training, files, timm's create_loader", "evaluation of the files",
    ]  # fmt: skip
    assert all(len(row["images_per_s"]) == 2 and min(row["images_per_s"]) > 0 for row in rows)
    assert ran.stdout.count("\n| ") == len(rows) + 1 and ran.stdout.count("'device_busy_ms'") == 2 * 5
