"""Figures from single answers: confusion matrix, per-class accuracy, calibration error, mistakes."""

import csv
import json

import numpy as np
import pytest
from PIL import Image

import train
from vitkernels.training.answers import (
    Answers,
    confusion_matrix,
    expected_calibration_error,
    per_class_accuracy,
    spread_sample,
    worst_mistakes,
)


def answers(targets, predicted, confidence) -> Answers:
    return Answers(np.arange(len(targets)), *map(np.array, (targets, predicted, confidence)))


def test_confusion_matrix__rows_are_true_classes():
    matrix = confusion_matrix(answers([0, 0, 1, 2], [0, 1, 1, 0], [0.9] * 4), 4)
    assert matrix.tolist() == [[1, 1, 0, 0], [0, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert per_class_accuracy(matrix) == [50, 100, 0, None]


def test_expected_calibration_error__matches_its_definition():
    """Written out as equation 3 of Guo et al. 2017, with bins (low, high]."""
    draw = np.random.default_rng(0)
    confidence = np.concatenate([draw.uniform(0.1, 1, 500), [1 / 15, 2 / 15, 1.0, 0.2]])
    targets = draw.integers(0, 3, len(confidence))
    predicted = np.where(draw.uniform(size=len(confidence)) < confidence**2, targets, (targets + 1) % 3)
    given, error = answers(targets, predicted, confidence), 0.0
    for i in range(15):
        inside = (confidence > i / 15) & (confidence <= (i + 1) / 15)
        if inside.any():
            gap = (predicted == targets)[inside].mean() - confidence[inside].mean()
            error += inside.sum() / len(targets) * abs(gap)
    assert expected_calibration_error(given) == pytest.approx(100 * error)
    assert error > 0.05


def test_expected_calibration_error__of_a_calibrated_model_is_zero():
    assert expected_calibration_error(answers([0, 0, 0, 1], [0, 0, 0, 0], [0.75] * 4)) == pytest.approx(0)
    assert expected_calibration_error(answers([1, 1], [0, 0], [1.0, 1.0])) == pytest.approx(100)


def test_worst_mistakes__wrong_answers_by_confidence():
    given = answers([0, 1, 0, 1], [0, 0, 1, 0], [0.99, 0.5, 0.9, 0.6])
    assert worst_mistakes(given, 2).tolist() == [2, 3]


def test_spread_sample__shows_first_and_last_images():
    given = answers([0] * 9, [0] * 9, [0.5] * 9)
    assert spread_sample(given, 3).tolist() == [0, 4, 8] and spread_sample(given, 99).tolist() == list(range(9))


def test_evaluation__writes_tables_that_agree_with_its_accuracy(settings, tmp_path, caplog):
    small = ["runtime=cpu", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1", "+model.kwargs.depth=1"]
    train.run(settings(*small, "trainer.max_steps=2", "trainer.warmup_steps=1"), tmp_path / "run")
    caplog.set_level("INFO")
    words = ["mode=eval", f"checkpoint={tmp_path / 'run/model.safetensors'}", "data.batch_size=50"]
    train.run(settings(*small, *words), tmp_path / "eval")
    report = json.loads((tmp_path / "eval/eval.json").read_text())
    with open(tmp_path / "eval/per_class.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["class"] for row in rows] == [str(digit) for digit in range(10)]
    right = sum(int(row["images"]) * float(row["top1"]) / 100 for row in rows)
    assert sum(int(row["images"]) for row in rows) == 360 and 100 * right / 360 == pytest.approx(report["top1"])
    with open(tmp_path / "eval/confusion.csv") as file:
        matrix = np.array([[int(cell) for cell in row[1:]] for row in list(csv.reader(file))[1:]])
    assert matrix.sum() == 360 and np.trace(matrix) == pytest.approx(right)
    assert 0 < report["ece"] < 100
    for name in ("confusion.png", "mistakes.png", "predictions.png"):
        for folder in ("eval", "run"):  # training draws them after its last evaluation
            with Image.open(tmp_path / folder / name) as picture:
                assert picture.width > 300
    assert (tmp_path / "run/per_class.csv").read_text() == (tmp_path / "eval/per_class.csv").read_text()
    assert "top-5" in caplog.text and "calibration error" in caplog.text


def test_log__has_no_top5_with_five_classes_or_fewer(settings, tmp_path, caplog):
    caplog.set_level("INFO")
    small = ["runtime=cpu", "+model.kwargs.embed_dim=32", "+model.kwargs.num_heads=1", "+model.kwargs.depth=1"]
    small += ["data=fake", "data.items=64", "data.num_classes=5", "data.batch_size=32", "trainer.warmup_steps=1"]
    train.run(settings(*small, "trainer.max_steps=2"), tmp_path / "run")
    train.run(settings(*small, "mode=eval", f"checkpoint={tmp_path / 'run/best.safetensors'}"), tmp_path / "eval")
    assert "val top-1" in caplog.text and "top-5" not in caplog.text
