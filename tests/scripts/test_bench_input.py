"""scripts/bench_input.py on a CPU: its table and rows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.slow
def test_main__measures_each_pipeline_and_training(tmp_path):
    words = "--loaders --images 60 --size 64 48 --side 32 --batch 8 --workers 0 --rounds 2 --seconds 0.1 --steps 4"
    arguments = [*words.split(), "--root", str(tmp_path), "--results", str(tmp_path / "rows.jsonl")]
    tiny = ["model.name=vit_tiny_patch16_224", "model.img_size=32", "+model.kwargs.depth=1", "runtime=cpu"]
    command = [sys.executable, str(SCRIPT), *arguments, "--train", *tiny]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    names = [row["pipeline"] for row in rows]
    assert names[-7:] == [
        "timm's create_loader", "training, data=fake", "training, files", "training, files, mixup, cutmix, erasing",
        "training, files, RandAugment", "training, files, timm's create_loader", "evaluation of the files",
    ]  # fmt: skip
    assert all(len(row["images_per_s"]) == 2 and min(row["images_per_s"]) > 0 for row in rows)
    assert ran.stdout.count("\n| ") == len(rows) + 1 and ran.stdout.count("'device_busy_ms'") == 2 * 5
