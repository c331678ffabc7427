"""What a run's folder says of itself."""

import pytest

from vitkernels.errors import UsageError
from vitkernels.training import run_folder


def test_weights_know_their_classes_and_others_are_refused(tmp_path, settings):
    checkpoint = tmp_path / "checkpoints" / "step_00000008"
    run_folder.write_json(checkpoint / "state.json", {"class_names": ["a", "b", "c"]})
    run_folder.begin(tmp_path, settings(), resumed=False, class_names=["a", "b", "c"])
    for weights in (checkpoint, tmp_path / "model.safetensors"):
        run_folder.refuse_other_classes(weights, ["a", "b", "c"])
        run_folder.refuse_other_classes(weights, None)
        with pytest.raises(UsageError, match="number 0 is 'a' there and '0c' here"):
            run_folder.refuse_other_classes(weights, ["0c", "a", "b"])
        with pytest.raises(UsageError, match="number 2 is 'c' there and 'none' here"):
            run_folder.refuse_other_classes(weights, ["a", "b"])
    run_folder.refuse_other_classes(tmp_path / "elsewhere" / "timm.safetensors", ["a"])


def test_classes_that_timm_would_have_in_another_order_are_named(tmp_path, caplog):
    run_folder.refuse_other_classes(tmp_path / "timm.safetensors", ["1", "2", "10"])
    assert not caplog.text
    run_folder.refuse_other_classes(tmp_path / "timm.safetensors", ["1", "10", "2"])
    assert "its classes have another order" in caplog.text
