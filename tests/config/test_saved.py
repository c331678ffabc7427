"""Settings that an evaluation or a resumed run takes from an earlier run."""

import json
import shutil
from pathlib import Path

import pytest
from expecting import error
from omegaconf import OmegaConf

from vitkernels.config import Config, from_run
from vitkernels.config.saved import find_run, find_weights, read_settings

OLD_RUN = Path(__file__).resolve().parents[1] / "golden" / "run_folder"


@pytest.fixture
def run(tmp_path):
    """A run's folder, written by an older version, with a best checkpoint and exported weights."""
    folder = tmp_path / "run"
    shutil.copytree(OLD_RUN, folder, symlinks=True)
    return folder


@pytest.fixture
def completed(settings):
    """completed(*overrides) -> the settings of a command line after from_run, as plain values."""

    def complete(*overrides: str) -> dict:
        return OmegaConf.to_container(from_run(settings(*overrides), overrides), resolve=True)

    return complete


def test_from_run__leaves_a_reference_to_nothing_to_the_check_of_the_settings(settings):
    """Hydra's own list of overrides resolves references as it is read."""
    words = ["trainer.max_steps=${nowhere}"]
    cfg = from_run(settings(*words), OmegaConf.create(words))
    with error("config.interpolation", setting="trainer.max_steps"):
        Config.from_hydra(cfg)


def test_find_run__from_every_path_in_it(run):
    step = run / "checkpoints" / "step_00000020"
    for path in (run, run / "checkpoints", step, run / "checkpoints" / "best", run / "model.safetensors"):
        assert find_run(path) == run
    assert find_run(run.parent) is None


def test_find_run__ignores_configurations_of_other_programs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["ViT"], "model": "vit", "data": {}}))
    assert find_run(tmp_path / "model.safetensors") is None


def test_find_weights__best_checkpoint_before_exported_weights(run):
    assert find_weights(str(run)) == find_weights(str(run / "checkpoints")) == str(run / "checkpoints" / "best")
    (run / "checkpoints" / "best").unlink()
    assert find_weights(str(run)) == str(run / "model.safetensors")
    (run / "model.safetensors").unlink()
    with error("config.no_weights", setting="checkpoint", value=str(run)) as caught:
        find_weights(str(run))
    assert "step_00000020" in str(caught.value)


def test_find_weights__returns_other_paths_unchanged(run):
    for path in (run / "model.safetensors", run / "checkpoints" / "step_00000020", run / "nowhere"):
        assert find_weights(str(path)) == str(path)


def test_evaluation__uses_only_model_and_data_of_the_run(run, completed):
    plain = completed("mode=eval", f"checkpoint={run}", "attn=sdpa")
    saved = read_settings(run)
    assert plain["model"] == saved["model"] and plain["data"] == saved["data"]
    assert plain["data"]["_target_"] == "vitkernels.data.digits.build"  # which the old run called data.digits.build
    assert (plain["checkpoint"], plain["attn"]["name"]) == (str(run / "checkpoints" / "best"), "sdpa")
    assert plain["trainer"]["max_steps"] is None and plain["runtime"]["name"] == "auto"
    Config.from_dict(plain)


def test_command_line__takes_precedence_over_the_run(run, completed):
    words = ["mode=eval", f"checkpoint={run}", "data.batch_size=5", "++model.kwargs.depth=3", "++data.root=x"]
    plain, saved = completed(*words), read_settings(run)
    assert plain["data"] == {**saved["data"], "batch_size": 5, "root": "x"}
    assert plain["model"] == {**saved["model"], "kwargs": {**saved["model"]["kwargs"], "depth": 3}}


def test_group_on_the_command_line__replaces_the_run_group(run, completed):
    plain = completed("mode=eval", f"checkpoint={run}", "data=fake", "data.num_classes=7")
    assert plain["data"]["_target_"] == "vitkernels.data.fake.build" and plain["data"]["num_classes"] == 7
    assert "augment" not in plain["data"] and plain["model"]["kwargs"]["depth"] == 2


def test_deleted_setting__stays_deleted(run, completed):
    assert "degrees" not in completed("mode=eval", f"checkpoint={run}", "~data.degrees")["data"]


def test_experiment__uses_no_settings_of_the_run(run, completed, settings):
    words = ["mode=eval", f"checkpoint={run}/model.safetensors", "experiment=rise_of_pallas"]
    assert completed(*words) == OmegaConf.to_container(settings(*words), resolve=True)


def test_resume__uses_all_settings_of_the_run(run, completed):
    plain = completed(f"resume={run}", "trainer.max_steps=30", "seed=0")
    saved = read_settings(run)
    assert plain["trainer"] == {**saved["trainer"], "max_steps": 30}
    for name in saved.keys() - {"trainer"}:
        assert plain[name] == saved[name], name
    assert plain["resume"] == str(run) and plain["mode"] == "train"


@pytest.mark.parametrize("words", [["resume=auto"], ["resume=nowhere"], ["checkpoint=nowhere.pt"], []])
def test_no_run__settings_unchanged(words, completed, settings):
    assert completed(*words) == OmegaConf.to_container(settings(*words), resolve=True)


def test_constant_learning_rate__stays_constant(run, completed):
    settings = read_settings(run)
    settings["schedule"]["min_lr"] = settings["optim"]["lr"]
    (run / "config.json").write_text(json.dumps(settings))
    assert completed(f"resume={run}", "optim.lr=0.5")["schedule"]["min_lr"] == 0.5
    assert completed(f"resume={run}", "optim.lr=0.5", "schedule.min_lr=0.1")["schedule"]["min_lr"] == 0.1


def test_settings_from_a_run__are_logged(run, completed, caplog):
    caplog.set_level("INFO")
    completed("mode=eval", f"checkpoint={run}/model.safetensors", "data.batch_size=5")
    assert [record.args for record in caplog.records if "settings from" in record.message] == [
        (run, "model, data", "; from the command line: data.batch_size")
    ]
