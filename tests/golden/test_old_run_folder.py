"""A run folder of an earlier version resumes, continues and evaluates as in that version.

run_folder/ is a run of 20 steps with EMA, drop path and mixup, and checkpoints at steps 11 and 20.
"""

import json

import pytest
import torch
from cases import CASES, OLD, OLD_RUN, STOPPED_AT
from comparing import check, is_same_machine, metrics
from runs import HERE
from safetensors.torch import load_file
from timm.models.vision_transformer import VisionTransformer

WRITTEN = metrics(HERE / OLD)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("old_run")])
def test_old_run_folder__gives_the_recorded_figures(name, runs):
    check(name, runs)


def test_old_run_folder__resumed_at_step_11_has_the_recorded_losses(runs):
    if not is_same_machine("old_run_resumed"):
        pytest.skip("other versions: the recorded figures are compared with a tolerance")
    assert metrics(runs.folder("old_run_resumed")) == [line for line in WRITTEN if line["step"] > STOPPED_AT]


def test_old_run_folder__extended_continues_from_step_20(runs):
    lines = metrics(runs.folder("old_run_longer"))
    assert lines[: len(WRITTEN)] == WRITTEN
    assert [line["step"] for line in lines[len(WRITTEN) :]] == [21, 22, 23, 24, 24]
    assert json.loads((runs.folder("old_run_longer") / "summary.json").read_text())["steps"] == 24


def test_old_run_folder__resume_auto_finds_it_complete(runs):
    folder = runs.copy(HERE / OLD, "complete")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    runs.forked(*OLD_RUN, "resume=auto", f"hydra.run.dir={folder}")
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("name", ["model", "model_ema"])
def test_old_run_folder__weights_load_in_plain_timm(name):
    model = VisionTransformer(16, 4, 1, 10, global_pool="avg", embed_dim=8, depth=2, num_heads=1, class_token=False)
    model.load_state_dict(load_file(HERE / OLD / f"{name}.safetensors"), strict=True)
    assert model(torch.zeros(2, 1, 16, 16)).isfinite().all()
