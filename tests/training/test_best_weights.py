"""best.safetensors holds the weights that summary.json names as the best, also after a run was killed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import train
from vitkernels.checkpoint.checkpoints import load_tensors
from vitkernels.checkpoint.export import read_notes
from vitkernels.training import best_weights, trainer
from vitkernels.training.best_weights import is_better

SMALL = ["runtime=cpu", "data.batch_size=16", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1"]
SMALL += ["+model.kwargs.depth=1", "data=fake", "data.items=32", "trainer.max_steps=6", "trainer.warmup_steps=1"]


@pytest.fixture
def evaluations(monkeypatch):
    """evaluations([(top1, loss), ...]) makes the evaluations to come return these figures."""

    def give(figures: list) -> None:
        left = iter(figures)

        def evaluate(*_, **__) -> dict:
            top1, loss = next(left)
            return {"top1": top1, "top5": 100.0, "loss": loss, "images": 8, "images_per_s": None}

        monkeypatch.setattr(trainer, "evaluate", evaluate)

    return give


def best_of(folder: Path) -> dict:
    """The best evaluation that summary.json names; its weights are those of that step."""
    best = json.loads((folder / "summary.json").read_text())["best"]
    notes = read_notes(folder / best["weights"], ["best", "class_names"])
    assert notes["best"] == {name: value for name, value in best.items() if name != "weights"}
    return best


@pytest.mark.parametrize(
    ("found", "best", "expected"),
    [
        ({"top1": 60.0, "loss": 2.0}, {"top1": 50.0, "loss": 1.0}, True),
        ({"top1": 50.0, "loss": 0.5}, {"top1": 50.0, "loss": 1.0}, True),
        ({"top1": 50.0, "loss": 1.0}, {"top1": 50.0, "loss": 1.0}, False),
        ({"top1": 40.0, "loss": 0.5}, {"top1": 50.0, "loss": 1.0}, False),
        ({"top1": 50.0, "loss": 0.5}, {"top1": 50.0}, False),
    ],
)
def test_is_better__accuracy_then_loss(found, best, expected):
    assert is_better(found, best) is expected


def test_best_weights__are_those_of_the_best_evaluation_and_not_the_last(settings, evaluations, tmp_path):
    evaluations([(50.0, 2.0), (60.0, 2.0), (60.0, 3.0)])
    train.run(settings(*SMALL), tmp_path / "long")
    best = best_of(tmp_path / "long")
    assert (best["top1"], best["loss"], best["step"], best["epoch"]) == (60.0, 2.0, 4, 2.0)
    kept, last = load_file(tmp_path / "long/best.safetensors"), load_file(tmp_path / "long/model.safetensors")
    expected = load_tensors(tmp_path / "long/checkpoints/step_00000004", "model")
    assert kept.keys() == expected.keys() == last.keys()
    assert all(torch.equal(kept[name], expected[name]) for name in kept)
    assert any(not torch.equal(kept[name], last[name]) for name in kept)


def test_best_weights__tie_goes_to_the_lower_loss(settings, evaluations, tmp_path):
    evaluations([(60.0, 2.0), (60.0, 1.0), (60.0, 1.5)])
    train.run(settings(*SMALL), tmp_path)
    assert best_of(tmp_path)["step"] == 4


def test_best_weights__are_chosen_by_the_ema(settings, evaluations, tmp_path):
    evaluations([(90.0, 1.0), (10.0, 1.0), (80.0, 1.0), (30.0, 2.0), (70.0, 1.0), (20.0, 3.0)])
    train.run(settings(*SMALL, "ema.decay=0.9"), tmp_path)
    best = best_of(tmp_path)
    assert best["weights"] == "best_ema.safetensors" and best["top1"] == 30.0 and best["step"] == 4
    assert read_notes(tmp_path / "best.safetensors", ["best"])["best"]["step"] == 4


def test_best_weights__are_absent_without_an_evaluation(settings, tmp_path):
    train.run(settings(*SMALL, "trainer.eval_every=null"), tmp_path)
    assert json.loads((tmp_path / "summary.json").read_text())["best"] is None
    assert not (tmp_path / "best.safetensors").exists()


def test_resume__drops_best_weights_of_a_later_step_of_the_killed_run(settings, evaluations, tmp_path):
    """The killed attempt found a better step 4 than the resumed one, as on a GPU, whose sums differ in order."""
    evaluations([(50.0, 1.0), (70.0, 1.0), (40.0, 1.0)])
    train.run(settings(*SMALL, "checkpoints.keep=9"), tmp_path)
    (tmp_path / "summary.json").unlink()
    for step in (4, 6):
        shutil.rmtree(tmp_path / f"checkpoints/step_{step:08d}")
    evaluations([(50.0, 1.0), (45.0, 1.0), (40.0, 1.0)])  # the evaluation of step 2 was pending
    train.run(settings(*SMALL, "resume=auto"), tmp_path)
    assert best_of(tmp_path)["step"] == 2


def test_resume__forgets_a_best_evaluation_without_weights(settings, evaluations, tmp_path):
    """The run resumes at step 3; the killed attempt replaced the file, and the checkpoint of step 2 was deleted."""
    words = [*SMALL, "checkpoints.every_steps=3", "checkpoints.keep=9"]
    evaluations([(50.0, 1.0), (70.0, 1.0), (40.0, 1.0)])
    train.run(settings(*words), tmp_path)
    (tmp_path / "summary.json").unlink()
    for step in (2, 4, 6):
        shutil.rmtree(tmp_path / f"checkpoints/step_{step:08d}")
    evaluations([(45.0, 1.0), (40.0, 1.0)])
    train.run(settings(*words, "resume=auto"), tmp_path)
    assert best_of(tmp_path)["step"] == 4


def test_full_disk__keeps_the_earlier_best(settings, evaluations, monkeypatch, tmp_path):
    write = best_weights.export_safetensors

    def full(state_dict, path, notes):
        if notes["best"]["step"] == 4:
            raise OSError(28, "No space left on device")
        write(state_dict, path, notes)

    monkeypatch.setattr(best_weights, "export_safetensors", full)
    evaluations([(50.0, 1.0), (60.0, 1.0), (55.0, 1.0)])
    train.run(settings(*SMALL), tmp_path)
    assert best_of(tmp_path)["step"] == 6 and (tmp_path / "checkpoints/best").resolve().name == "step_00000006"
    assert not list(tmp_path.glob(".best*"))
