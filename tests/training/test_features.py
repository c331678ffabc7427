"""Nearest neighbors and the linear probe against scikit-learn, and evaluations of backbones end to end."""

import json

import numpy as np
import pytest
import torch
from expecting import error
from PIL import Image
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier

import train
from vitkernels import models
from vitkernels.training.features import PENALTIES, Features, accuracy, fit_linear_probe, knn_scores

SMALL = ["runtime=cpu", "+model.kwargs.depth=1", "mode=eval"]


def clusters(count, spread=1.0, classes=3, dims=6, seed=0):
    draw = torch.Generator().manual_seed(seed)
    targets = torch.arange(count) % classes
    centers = torch.randn(classes, dims, generator=torch.Generator().manual_seed(9))
    return Features(centers[targets] + spread * torch.randn(count, dims, generator=draw), targets)


def test_knn__equals_scikit_learn(monkeypatch):
    train_set, val = clusters(90), clusters(25, seed=1)
    reference = KNeighborsClassifier(7, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.1))
    expected = reference.fit(train_set.values.numpy(), train_set.targets.numpy()).predict_proba(val.values.numpy())
    found = knn_scores(train_set, val.values, 3, neighbors=7, temperature=0.1)
    np.testing.assert_allclose(found, expected, atol=1e-5)  # float32, and exponents of up to 10
    monkeypatch.setattr("vitkernels.training.features._CHUNK", 400)  # several chunks of four images
    torch.testing.assert_close(knn_scores(train_set, val.values, 3, 7, 0.1), found)


def test_knn__uses_all_images_if_there_are_fewer_than_neighbors():
    train_set = clusters(6)
    votes = knn_scores(train_set, train_set.values, 3, neighbors=20, temperature=1e6)
    torch.testing.assert_close(votes, torch.full((6, 3), 1 / 3), rtol=0, atol=1e-5)


def test_linear_probe__equals_scikit_learn():
    train_set, val = clusters(300, spread=2.0), clusters(60, spread=2.0, seed=1)
    probe = fit_linear_probe(train_set, 3)
    assert probe.penalty in PENALTIES
    standard = (train_set.values - probe.mean) / probe.scale
    reference = LogisticRegression(C=1 / (300 * probe.penalty), tol=1e-8, max_iter=1000)
    reference.fit(standard.numpy(), train_set.targets.numpy())
    expected = reference.predict_proba(((val.values - probe.mean) / probe.scale).numpy())
    np.testing.assert_allclose(probe.logits(val.values).softmax(1), expected, atol=2e-3)  # both stop near the minimum


def test_linear_probe__is_independent_of_chunks(monkeypatch):
    train_set = clusters(100, spread=2.0)
    at_once = fit_linear_probe(train_set, 3)
    monkeypatch.setattr("vitkernels.training.features._CHUNK", 3 * 17)
    in_chunks = fit_linear_probe(train_set, 3)
    torch.testing.assert_close(in_chunks.logits(train_set.values), at_once.logits(train_set.values), rtol=0, atol=1e-2)


def test_linear_probe__penalty_grows_with_noise():
    assert fit_linear_probe(clusters(40, spread=4.0), 3).penalty > fit_linear_probe(clusters(40, spread=0.1), 3).penalty


def test_accuracy__leaves_out_padding():
    probabilities = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.1, 0.9]])
    val = Features(torch.zeros(3, 1), torch.tensor([0, 1, -100]))
    assert accuracy(probabilities, val) == {"top1": 50.0, "top5": 100.0, "images": 2}


@pytest.fixture
def images(tmp_path):
    """The folder of a data set with a dark and a bright class."""
    for split, count in (("train", 8), ("val", 3)):
        for name, gray in (("dark", 40), ("light", 200)):
            folder = tmp_path / "images" / split / name
            folder.mkdir(parents=True)
            for index in range(count):
                Image.new("RGB", (40, 40), (gray + index,) * 3).save(folder / f"{index}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("name", ["knn", "linear_probe"])
def test_backbone_of_other_classes__separates_a_folder(name, images, settings, tmp_path):
    backbone = models.create_model("vit_tiny_patch16_224", "sdpa", img_size=32, depth=1, num_classes=7)
    torch.save(backbone.state_dict(), tmp_path / "backbone.pt")
    words = [*SMALL, "model=vit_tiny_patch16_224", "model.img_size=32", f"checkpoint={tmp_path / 'backbone.pt'}"]
    words += ["data=imagefolder", f"data.root={images}", "data.batch_size=4", "data.num_workers=0"]
    train.run(settings(*words, f"evaluation={name}", "evaluation.neighbors=3"), tmp_path / "eval")
    report = json.loads((tmp_path / "eval/eval.json").read_text())
    assert (report["evaluation"], report["images"], report["train_images"], report["features"]) == (name, 6, 16, 192)
    assert report["top1"] == 100.0 and (tmp_path / "eval/confusion.png").exists()


@pytest.mark.parametrize(("split", "readable"), [("training", "val"), ("evaluation", "train")])
def test_features_without_a_readable_image__are_refused(split, readable, images, settings, tmp_path):
    damaged = [path for path in images.rglob("*.png") if readable not in path.parts]
    for path in damaged:
        path.write_text("no image")
    backbone = models.create_model("vit_tiny_patch16_224", "sdpa", img_size=32, depth=1, num_classes=7)
    torch.save(backbone.state_dict(), tmp_path / "backbone.pt")
    words = [*SMALL, "model=vit_tiny_patch16_224", "model.img_size=32", f"checkpoint={tmp_path / 'backbone.pt'}"]
    words += ["data=imagefolder", f"data.root={images}", "data.batch_size=4", "data.num_workers=0"]
    count = len(damaged)
    with error("evaluation.no_images", split=split, unreadable=count, num_samples=count) as caught:
        train.run(settings(*words, "data.max_bad_share=1", "evaluation=knn"), tmp_path / "eval")
    assert str(images) in str(caught.value)


def test_data_set_without_plain_training_images__is_refused(settings, tmp_path):
    model = models.create_model("vit_digits", "sdpa", depth=1, num_classes=1024)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    words = [*SMALL, "data=fake", "data.batch_size=4", f"checkpoint={tmp_path / 'weights.pt'}"]
    with error("evaluation.data"):
        train.run(settings(*words, "evaluation=knn"), tmp_path / "eval")
