"""The wheel, installed outside of any checkout, trains: with its own configuration, and with a user's."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parents[2]
SMALL = ["runtime=cpu", "data.batch_size=16", "+model.kwargs.embed_dim=64", "+model.kwargs.num_heads=2"]
SMALL += ["+model.kwargs.depth=1", "trainer.max_steps=3", "trainer.warmup_steps=1", "checkpoints.every_epochs=null"]

OWN_DATA = """
from vitkernels.data import digits

def build(*, shade, **arguments):
    assert shade == 0.5
    return digits.build(**arguments)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.fixture
def vitkernels(site, tmp_path):
    """vitkernels(*words) -> the output of the installed command, run in tmp_path."""

    def run(*words: str) -> str:
        environment = {**os.environ, "PYTHONPATH": str(site)}
        ended = forked.run(["-m", "vitkernels", *words], tmp_path, environment, merged=True)
        assert ended.returncode == 0, ended.stdout
        return ended.stdout

    return run


def test_wheel__has_the_command_and_its_files(site):
    assert "vitkernels = vitkernels.cli.main:main" in next(site.glob("*.dist-info/entry_points.txt")).read_text()
    package = site / "vitkernels"
    assert (package / "py.typed").exists() and (package / "train.py").read_text() == (ROOT / "train.py").read_text()
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert (package / path.relative_to(ROOT)).read_text() == path.read_text()


@pytest.mark.slow
def test_installed__trains_evaluates_and_resumes(vitkernels, tmp_path):
    vitkernels("train", *SMALL, "data.degrees=5", "hydra.run.dir=out")
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert (summary["status"], summary["steps"], summary["git_commit"]) == ("done", 3, None)
    vitkernels("eval", "out", "runtime=cpu", "data.num_workers=0")
    evaluated = json.loads(next(tmp_path.glob("runs/*/eval.json")).read_text())
    assert evaluated["top1"] == summary["val_top1"] and evaluated["settings"]["data"]["degrees"] == 5
    assert evaluated["settings"]["model"]["kwargs"]["embed_dim"] == 64


@pytest.mark.slow
def test_installed__sweeps_over_a_users_configuration_and_data(vitkernels, tmp_path):
    (tmp_path / "mine" / "attn").mkdir(parents=True)
    (tmp_path / "mine" / "data").mkdir()
    (tmp_path / "mine" / "attn" / "ours.yaml").write_text("name: sdpa\n")
    (tmp_path / "mine" / "data" / "shaded.yaml").write_text(
        "_target_: shaded.build\nbatch_size: 16\nnum_workers: 0\nshade: 0.5\n"
    )
    (tmp_path / "shaded.py").write_text(OWN_DATA)
    vitkernels("train", "-m", "--config-dir", "mine", "attn=ours,native", "data=shaded", "sweep.rounds=1", *SMALL)
    (table,) = tmp_path.glob("runs/sweeps/*/comparison.json")
    assert len(json.loads(table.with_name("rounds.json").read_text())["rounds"]) == 1
    rows = {row["variant"]: row for row in json.loads(table.read_text())}
    assert {variant: row["status"] for variant, row in rows.items()} == {"attn=ours": "done", "attn=native": "done"}


def test_installed__doctor_and_help(vitkernels):
    assert "attn=native" in vitkernels("doctor")
    text = vitkernels("train", "--help")
    assert "  vitkernels train mode=eval checkpoint=RUN" in text and "train.py " not in text.split("Tab completion")[0]


@pytest.mark.slow
def test_installed__completes_the_command(vitkernels, monkeypatch):
    assert vitkernels("-sc", "install=bash").rstrip().endswith("hydra_bash_completion vitkernels")
    monkeypatch.setenv("COMP_LINE", "vitkernels train attn=nat")
    assert vitkernels("-sc", "query=bash").split() == ["attn=native"]
    monkeypatch.setenv("COMP_LINE", "vitkernels tr")
    assert vitkernels("-sc", "query=bash").split() == ["train"]
