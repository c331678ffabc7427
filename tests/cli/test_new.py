"""`vitkernels new`: the project it writes passes its tests and trains."""

import json
import os
from pathlib import Path

import forked
import pytest

from vitkernels.cli import main as console

ROOT = Path(__file__).resolve().parents[2]


def run(folder: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = forked.run(["-m", *arguments], folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_new_project__passes_its_tests_and_trains(tmp_path):
    run(tmp_path, "vitkernels", "new", "project")
    project = tmp_path / "project"
    assert " passed" in run(project, "pytest", "-q", "-p", "no:cacheprovider")
    settings = ["runtime=cpu", "trainer.max_epochs=2", "hydra.run.dir=runs/first"]
    run(project, "vitkernels", "train", "--config-dir=conf", "data=mine", "attn=mine", *settings)
    summary = json.loads((project / "runs/first/summary.json").read_text())
    assert (summary["status"], summary["attn"], summary["val_top1"]) == ("done", "mine", 100.0)


def test_new__refuses_a_folder_with_content(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("kept")
    assert console.main(["new", str(tmp_path)]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
