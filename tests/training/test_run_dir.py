"""What a run's folder says of itself, and its weights of what they learned from."""

import pytest
import torch
from safetensors.torch import save_file

from vitkernels.checkpoint.checkpoints import export_safetensors
from vitkernels.errors import UsageError
from vitkernels.training import run_dir

PREPARED = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}


def test_weights_know_what_they_learned_from(tmp_path):
    learned = {"class_names": ["a", "b", "c"], "preprocessing": PREPARED}
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    run_dir.write_json(checkpoint / "state.json", learned)
    export_safetensors({"x": torch.zeros(1)}, tmp_path / "model.safetensors", learned)
    for weights in (checkpoint, tmp_path / "model.safetensors"):
        assert run_dir.learned_from(weights) == learned


def test_of_older_weights_their_run_knows_it(tmp_path, settings):
    """Into files of weights it has been written only since images could be prepared as the model wants them."""
    (tmp_path / "checkpoints" / "step_00000008").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("step_00000008")
    run_dir.write_json(tmp_path / "checkpoints" / "step_00000008" / "state.json", {"class_names": ["b", "a"]})
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    run_dir.write_json(tmp_path / "class_names.json", ["b", "a"])
    data = {name: value for name, value in PREPARED.items() if name != "crop_mode"}
    run_dir.write_json(tmp_path / "config.json", {"data": data})
    for weights in ("checkpoints/best", "model.safetensors"):
        expected = {"class_names": ["b", "a"], "preprocessing": PREPARED}
        assert run_dir.learned_from(tmp_path / weights) == expected


def test_of_other_weights_nothing_is_known(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "timm.safetensors", {"format": "pt"})
    torch.save({"x": torch.zeros(1)}, tmp_path / "timm.pt")
    for weights in ("timm.safetensors", "timm.pt", "nothing.safetensors"):
        assert run_dir.learned_from(tmp_path / weights) == {"class_names": None, "preprocessing": None}


def test_other_classes_are_refused():
    for ours, theirs in ((["a"], ["a"]), (["a"], None), (None, ["a"])):
        run_dir.check_data("weights", {"class_names": theirs, "preprocessing": None}, ours, PREPARED)
    for ours, difference in ((["0c", "a", "b"], "0 is 'a' there and '0c'"), (["a", "b"], "2 is 'c' there and 'none'")):
        with pytest.raises(UsageError, match=f"weights has learned other classes .* number {difference} here"):
            run_dir.check_data("weights", {"class_names": ["a", "b", "c"], "preprocessing": PREPARED}, ours, None)


def test_classes_that_timm_would_have_in_another_order_are_named(caplog):
    for outputs, ours in ((3, ["1", "2", "10"]), (3, ["01", "02", "10"]), (0, None), (1000, ["1", "10", "2"])):
        run_dir.name_order_of_timm("weights", outputs, ours)
    assert not caplog.text
    run_dir.name_order_of_timm("weights", 3, ["1", "10", "2"])
    assert "its class number 1 is '2' and here it is '10'" in caplog.text


def test_settings_that_came_later_keep_no_run_from_going_on(tmp_path, settings):
    cfg = settings("resume=auto")
    before = run_dir.identity(cfg)
    del before["schedule"]["warmup_cap"]
    run_dir.write_json(tmp_path / "config.json", before)
    (tmp_path / "metrics.jsonl").write_text("logged")
    assert run_dir.open_for(tmp_path, cfg) == (tmp_path, False)
    with pytest.raises(UsageError, match=r"schedule\.warmup_cap is 0\.1 there and 0\.5 here"):
        run_dir.open_for(tmp_path, settings("resume=auto", "schedule.warmup_cap=0.5"))
