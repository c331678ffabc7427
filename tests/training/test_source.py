"""Class names and preprocessing of weights, read from them or from their run, and compared with the data set."""

import pytest
import torch
from expecting import error
from safetensors.torch import save_file

from vitkernels.checkpoint.export import export_safetensors
from vitkernels.checkpoint.trained_on import TrainedOn, read_trained_on
from vitkernels.files import write_json
from vitkernels.training import source

PREPROCESSING = {"mean": [0.5], "std": [0.5], "interpolation": "bicubic", "crop_pct": 0.9, "crop_mode": "center"}


def test_trained_on__read_from_checkpoint_and_exported_weights(tmp_path):
    notes = {"class_names": ["a", "b", "c"], "preprocessing": PREPROCESSING}
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    write_json(checkpoint / "state.json", notes)
    export_safetensors({"x": torch.zeros(1)}, tmp_path / "model.safetensors", notes)
    for weights in (checkpoint, tmp_path / "model.safetensors"):
        assert read_trained_on(weights) == TrainedOn(**notes)


def test_trained_on__read_from_the_run_of_older_weights(tmp_path):
    """Older weights carry no notes, but their run's folder has config.json and class_names.json."""
    (tmp_path / "checkpoints" / "step_00000008").mkdir(parents=True)
    (tmp_path / "checkpoints" / "best").symlink_to("step_00000008")
    write_json(tmp_path / "checkpoints" / "step_00000008" / "state.json", {"class_names": ["b", "a"]})
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    write_json(tmp_path / "class_names.json", ["b", "a"])
    data = {name: value for name, value in PREPROCESSING.items() if name != "crop_mode"}
    write_json(tmp_path / "config.json", {"data": data})
    for weights in ("checkpoints/best", "model.safetensors"):
        assert read_trained_on(tmp_path / weights) == TrainedOn(["b", "a"], PREPROCESSING)


def test_trained_on__unknown_for_foreign_weights(tmp_path):
    save_file({"x": torch.zeros(1)}, tmp_path / "timm.safetensors", {"format": "pt"})
    torch.save({"x": torch.zeros(1)}, tmp_path / "timm.pt")
    for weights in ("timm.safetensors", "timm.pt", "nothing.safetensors"):
        assert read_trained_on(tmp_path / weights) == TrainedOn(None, None)


@pytest.mark.parametrize(("ours", "theirs"), [(["a"], ["a"]), (["a"], None), (None, ["a"])])
def test_same_or_unknown_classes__are_accepted(ours, theirs):
    source.check_data("weights", TrainedOn(theirs, None), ours, PREPROCESSING)


@pytest.mark.parametrize(
    ("ours", "number", "names"), [(["0c", "a", "b"], 0, ("a", "0c")), (["a", "b"], 2, ("c", "none"))]
)
def test_other_classes__are_refused(ours, number, names):
    with error("weights.classes", number=number, names=names):
        source.check_data("weights", TrainedOn(["a", "b", "c"], PREPROCESSING), ours, None)


def test_timm_class_order__is_logged_only_if_it_differs(caplog):
    for outputs, ours in ((3, ["1", "2", "10"]), (3, ["01", "02", "10"]), (0, None), (1000, ["1", "10", "2"])):
        source.warn_of_timm_class_order("weights", outputs, ours)
    assert not caplog.text
    source.warn_of_timm_class_order("weights", 3, ["1", "10", "2"])
    assert "its class 1 is '2', and not '10' as here" in caplog.text
