"""A run's folder: settings recorded by older versions."""

import copy

import pytest
from expecting import error
from omegaconf import OmegaConf

from vitkernels.config import location
from vitkernels.files import read_json, write_json
from vitkernels.training import run_dir


def plain(cfg):
    return OmegaConf.to_container(cfg, resolve=True)


@pytest.mark.parametrize(
    ("by_command", "script", "expected"),
    [
        (True, str(location.train_script()), "vitkernels train seed=3"),
        (False, str(location.train_script()), f"python {location.train_script()} seed=3"),
        (True, "mine.py", "python mine.py seed=3"),
    ],
)
def test_command__is_the_one_that_was_typed(tmp_path, settings, monkeypatch, by_command, script, expected):
    monkeypatch.setattr(location, "PROGRAM", "vitkernels train" if by_command else "python train.py")
    monkeypatch.setattr("sys.argv", [script, "seed=3"])
    run_dir.begin(tmp_path, plain(settings()), resumed=False, notes={})
    assert read_json(tmp_path / "command.json") == {"command": expected}


def test_command__of_a_resumed_run_is_named_in_errors(tmp_path, settings, monkeypatch):
    """A run may continue with other settings than it was started with, so that the first command would be refused."""
    for words in (["seed=3"], ["seed=3", "resume=auto"]):
        monkeypatch.setattr("sys.argv", [str(location.train_script()), *words])
        run_dir.begin(tmp_path, plain(settings()), resumed="resume=auto" in words, notes={})
    commands = read_json(tmp_path / "command.json")
    assert commands["command"].endswith(" seed=3")
    assert run_dir.started_with(tmp_path) == f"; it was last continued with: {commands['continued_with']}"
    assert commands["continued_with"].endswith(" seed=3 resume=auto")


def test_resume__missing_path_is_refused_before_anything_is_built(tmp_path, settings):
    with error("checkpoint.missing"):
        run_dir.claim(tmp_path, plain(settings(f"resume={tmp_path / 'nope'}")))


def test_settings_added_later__do_not_block_a_resume(tmp_path, settings):
    now = plain(settings("resume=auto"))
    before = copy.deepcopy(run_dir.identity(now))
    del before["schedule"]["warmup_cap"]
    before["data"]["_target_"] = "data.digits.build"  # before the data sets were part of the package
    write_json(tmp_path / "config.json", before)
    (tmp_path / "metrics.jsonl").write_text("logged")
    assert run_dir.claim(tmp_path, now) == (tmp_path, False)
    write_json(tmp_path / "command.json", {"command": "python train.py seed=0"})
    changed = ["schedule.warmup_cap was 0.1 and is now 0.5"]
    with error("run.settings_differ", differences=changed) as caught:
        run_dir.claim(tmp_path, plain(settings("resume=auto", "schedule.warmup_cap=0.5")))
    assert "it was started with: python train.py seed=0" in str(caught.value)
