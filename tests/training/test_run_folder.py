"""What a run's folder says of itself."""

import pytest
import torch
from safetensors.torch import save_file

from vitkernels.errors import UsageError
from vitkernels.training import run_folder
from vitkernels.training.checkpoint import export_safetensors


def test_weights_know_their_classes_and_others_are_refused(tmp_path, settings):
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    run_folder.write_json(checkpoint / "state.json", {"class_names": ["a", "b", "c"]})
    export_safetensors({"x": torch.zeros(1)}, tmp_path / "model.safetensors", {"class_names": ["a", "b", "c"]})
    for weights in (checkpoint, tmp_path / "model.safetensors"):
        run_folder.refuse_other_classes(weights, ["a", "b", "c"])
        run_folder.refuse_other_classes(weights, None)
        with pytest.raises(UsageError, match="number 0 is 'a' there and '0c' here"):
            run_folder.refuse_other_classes(weights, ["0c", "a", "b"])
        with pytest.raises(UsageError, match="number 2 is 'c' there and 'none' here"):
            run_folder.refuse_other_classes(weights, ["a", "b"])
    save_file({"x": torch.zeros(1)}, tmp_path / "timm.safetensors", {"format": "pt"})
    torch.save({"x": torch.zeros(1)}, tmp_path / "timm.pt")
    for weights in ("timm.safetensors", "timm.pt", "nothing.safetensors"):
        run_folder.refuse_other_classes(tmp_path / weights, ["a"])


def test_classes_that_timm_would_have_in_another_order_are_named(tmp_path, caplog):
    for same in (["1", "2", "10"], ["01", "02", "10"], None):
        run_folder.name_order_of_timm(tmp_path / "timm.safetensors", same)
    export_safetensors({"x": torch.zeros(1)}, tmp_path / "ours.safetensors", {"class_names": ["1", "10", "2"]})
    run_folder.name_order_of_timm(tmp_path / "ours.safetensors", ["1", "10", "2"])
    assert not caplog.text
    run_folder.name_order_of_timm(tmp_path / "timm.safetensors", ["1", "10", "2"])
    assert "its class number 1 is '2' and here it is '10'" in caplog.text
