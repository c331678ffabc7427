"""A run's folder: settings recorded by older versions."""

import copy

from expecting import error
from omegaconf import OmegaConf

from vitkernels.files import write_json
from vitkernels.training import run_dir


def plain(cfg):
    return OmegaConf.to_container(cfg, resolve=True)


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
