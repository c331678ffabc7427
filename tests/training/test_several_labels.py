"""Training and evaluation on images with several labels, by binary cross-entropy and mean average precision."""

import json

import numpy as np
import pytest
import torch
from expecting import error
from PIL import Image

import train
from vitkernels.parallel import create
from vitkernels.runtime import create as create_runtime
from vitkernels.training.average_precision import mean_average_precision
from vitkernels.training.best_weights import is_better

SMALL = ["runtime=cpu", "attn=sdpa", "model.in_chans=3", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=2"]
SMALL += ["+model.kwargs.depth=1", "data=table", "data.num_workers=0", "data.batch_size=8", "data.hflip=0"]
SMALL += ["data.scale=[0.9,1]", "schedule=constant", "optim.lr=0.01", "schedule.warmup_epochs=0"]


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """40 images that are bright or not, and red or not; a third label is never given."""
    folder, rows = tmp_path_factory.mktemp("labels"), []
    chance = np.random.default_rng(0)
    for number in range(40):
        bright, red = number % 2, number // 2 % 2
        pixels = chance.integers(0, 60, (20, 20, 3)) + 120 * bright
        pixels[..., 0] += 70 * red
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number}.png")
        labels = ["bright"] * bright + ["red"] * red
        rows.append({"path": f"{number}.png", "targets": labels, "split": "val" if number >= 28 else "train"})
    rows[0]["targets"] = ["rare"]
    (folder / "labels.json").write_text(json.dumps(rows))
    return folder / "labels.json"


def test_mean_average_precision__of_known_ranks():
    parallel = create("none", runtime=create_runtime("cpu", "fp32"), accum_steps=1)
    first = torch.tensor([[0.9, 0.1, 0.0], [0.8, 0.7, 0.0]]), torch.tensor([[1.0, 0.0, 0.4], [0.0, 1.0, 0.0]])
    second = torch.tensor([[0.7, 0.9, 0.0], [9.9, 9.9, 9.9]]), torch.tensor([[0.6, 0.5, 0.0], [-100.0, -100.0, -100.0]])
    # Class 0: labels at ranks 1 and 3, (1 + 2/3) / 2. Class 1: at rank 2, 1/2. Class 2 has no label above 0.5.
    assert mean_average_precision([first, second], parallel) == pytest.approx(100 * (5 / 6 + 1 / 2) / 2)
    assert np.isnan(mean_average_precision([(first[0], torch.zeros(2, 3))], parallel))


def test_is_better__compares_mean_average_precision():
    best = {"map": 50.0, "top1": 90.0, "loss": 1.0}
    assert is_better({"map": 51.0, "top1": 80.0, "loss": 2.0}, best)
    assert not is_better({"map": 49.0, "top1": 99.0, "loss": 0.1}, best)
    assert is_better({"map": 50.0, "top1": 90.0, "loss": 0.9}, best)
    assert is_better({"map": 0.0, "top1": 0.0, "loss": 9.0}, {"top1": -1.0, "step": 0})


@pytest.mark.slow
def test_training__learns_several_labels(table, settings, tmp_path, caplog):
    caplog.set_level("INFO", "vitkernels")
    cfg = [*SMALL, f"data.table={table}"]
    train.run(settings(*cfg, "trainer.max_steps=24", "trainer.log_every=8", "ema.decay=0.5"), tmp_path / "run")
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["val_map"] > 95 and summary["best"]["map"] >= summary["val_map"] - 1e-9
    assert summary["val_top1"] <= 75  # a quarter of the images has no label, so no answer is right
    assert "val mAP" in caplog.text
    train.run(settings(*cfg, "mode=eval", f"checkpoint={tmp_path}/run/model.safetensors"), tmp_path / "eval")
    found = json.loads((tmp_path / "eval/eval.json").read_text())
    for figure in ("map", "top1", "loss"):
        assert found[figure] == pytest.approx(summary[f"val_{figure}"], rel=1e-5)
    assert "ece" not in found and not (tmp_path / "eval/confusion.csv").exists()
    with error("config.conflict", setting="evaluation.name"):
        knn = [*cfg, "mode=eval", "evaluation=knn", f"checkpoint={tmp_path}/run/model.safetensors"]
        train.run(settings(*knn), tmp_path / "knn")


@pytest.mark.parametrize("words, setting", [
    (["trainer.loss=cross_entropy"], "trainer.loss"), (["distill.teacher=vit_tiny_patch16_224"], "distill.teacher"),
])  # fmt: skip
def test_training__refuses_settings_for_one_class_per_image(table, settings, tmp_path, words, setting):
    with error("config.conflict", setting=setting):
        train.run(settings(*SMALL, f"data.table={table}", "trainer.max_steps=1", *words), tmp_path / "run")


def test_training__with_bce_on_class_numbers(settings, tmp_path, losses):
    words = ["runtime=cpu", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=2", "+model.kwargs.depth=1"]
    words += ["trainer.max_steps=3", "trainer.eval_every=null"]
    train.run(settings(*words, "trainer.loss=bce"), tmp_path / "run")
    assert all(0.2 < loss < 0.8 for loss in losses(tmp_path / "run").values())  # log 2 for answers near 1/2
    with error("config.conflict", setting="trainer.bce_threshold"):
        train.run(settings(*words, "trainer.bce_threshold=0.2"), tmp_path / "other")
