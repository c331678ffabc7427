"""The page of a run: complete, unfinished, and hostile to HTML."""

import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from expecting import error
from PIL import Image

from vitkernels.cli import main as console
from vitkernels.training.report import curve, write_report

OLD_RUN = Path(__file__).resolve().parents[1] / "golden/run_folder"


class Balanced(HTMLParser):
    """Fails if a tag is closed that was not the last one opened."""

    def __init__(self):
        super().__init__()
        self.open, self.texts, self.pictures = [], [], 0

    def handle_starttag(self, tag, attributes):
        links = {value for name, value in attributes if name in ("src", "href")}
        assert all(link.startswith("data:image/png;base64,") for link in links)  # nothing outside the page
        self.pictures += len(links)
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)


def read(path: Path) -> Balanced:
    parser = Balanced()
    parser.feed(path.read_text())
    assert not parser.open
    return parser


def test_write_report__of_a_run_by_an_earlier_version(tmp_path):
    path = write_report(OLD_RUN, tmp_path / "page.html")
    text = " ".join(read(path).texts)
    summary = json.loads((OLD_RUN / "summary.json").read_text())
    assert f"{summary['val_top1']:.2f} %" in text and summary["git_commit"] in text
    assert "Training loss" in text and "Top-1 accuracy" in text and "How to repeat it" in text
    steps = [line for line in (OLD_RUN / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
    (points,) = re.findall(r'aria-label="Training loss".*?polyline points="([^"]*)"', path.read_text(), re.DOTALL)
    assert len(points.split()) == len(steps)


def test_write_report__of_an_unfinished_run_with_a_torn_line(tmp_path):
    run = tmp_path / "<b>run & co"
    run.mkdir()
    lines = (
        '{"step": 1, "loss": 2.0, "grad_norm": 1.0, "lr": 0.1}\n{"step": 2, "loss": NaN, "grad_norm": 1.0, "lr": 0.1}\n'
    )
    (run / "metrics.jsonl").write_text(lines + '{"step": 3, "lo')
    Image.new("RGB", (4, 4)).save(run / "mistakes.png")
    command = "python train.py 'hydra.run.dir=a folder' 'a=<script>'"
    (run / "command.json").write_text(json.dumps({"command": command}))
    parsed = read(write_report(run))
    text = " ".join(parsed.texts)
    assert parsed.pictures == 1 and "most confident mistakes" in text
    assert "This run is not complete" in text and "python train.py 'a=<script>'" in text and "<b>run & co" in text
    assert (run / "report.html").exists()


@pytest.mark.parametrize(("classes", "title"), [(5, "top-1 at the end"), (6, "top-1, top-5 at the end")])
def test_write_report__shows_top5_with_more_than_five_classes(tmp_path, classes, title):
    for name in ("summary.json", "metrics.jsonl", "config.json"):
        shutil.copy(OLD_RUN / name, tmp_path)
    (tmp_path / "class_names.json").write_text(json.dumps([f"class {n}" for n in range(classes)]))
    assert title in read(write_report(tmp_path)).texts


def test_report__command_line(tmp_path, capsys):
    assert console.main(["report", str(OLD_RUN), "--out", str(tmp_path / "a/page.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a/page.html")
    assert console.main(["report", str(tmp_path / "none")]) == 2
    with error("report.no_run", folder=str(tmp_path)):
        write_report(tmp_path)


@pytest.mark.parametrize("count", [1, 599, 5000])
def test_curve__long_runs_are_averaged(count):
    points = [(step, float(step)) for step in range(1, count + 1)]
    (line,) = re.findall(r'polyline points="([^"]*)"', curve("loss", points))
    assert min(count, 300) <= len(line.split()) <= 600


def test_curve__is_empty_without_a_finite_value():
    assert curve("loss", [(1, float("nan"))]) == "" and curve("loss", []) == ""
