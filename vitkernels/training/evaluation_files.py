"""Write the detailed results of an evaluation to its folder, as tables and pictures, and log a summary."""

import csv
import io
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitkernels.data import Data
from vitkernels.files import write_atomically
from vitkernels.inference.contact_sheet import contact_sheet
from vitkernels.training.answers import (
    UNNUMBERED,
    Answers,
    confusion_matrix,
    per_class_accuracy,
    spread_sample,
    worst_mistakes,
)

log = logging.getLogger("vitkernels")

MOST_CLASSES = 5000  # a confusion matrix of 200 MB
DRAWN = 40  # images on one picture
LISTED = 20  # classes and confusions in the log


def write_findings(answers: Answers, data: Data, folder: Path) -> dict[str, Path]:
    """Write an evaluation's tables and pictures to the folder, and return the pictures by name.

    Files: per_class.csv, confusion.csv, confusion.png, and, from data sets that load single images, predictions.png and
    mistakes.png.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = _names(data)
    pictures = _draw_images(answers, data, names, folder)
    if len(names) > MOST_CLASSES:
        return pictures
    matrix = confusion_matrix(answers, data.num_classes)
    counts, accuracy = matrix.sum(1).tolist(), per_class_accuracy(matrix)
    rows = [[name, count, share] for name, count, share in zip(names, counts, accuracy, strict=True)]
    _write_csv(folder / "per_class.csv", [["class", "images", "top1"], *rows])
    _write_csv(
        folder / "confusion.csv",
        [["true \\ predicted", *names], *([n, *r] for n, r in zip(names, matrix.tolist(), strict=True))],
    )
    _draw_confusions(matrix, names, folder / "confusion.png")
    return {"confusion": folder / "confusion.png", **pictures}


def log_findings(answers: Answers, data: Data) -> None:
    """Log the accuracy of each class, or of the worst ones, and the most frequent confusions."""
    names = _names(data)
    if len(names) <= MOST_CLASSES:
        matrix = confusion_matrix(answers, data.num_classes)
        _log_classes(names, matrix.sum(1).tolist(), per_class_accuracy(matrix))
        _log_confusions(names, matrix)
    else:
        log.info("no per-class files: the confusion matrix of %d classes would be larger than the data", len(names))
    if getattr(data.val, "load", None) is None:
        log.info("no pictures of images: %s has no method load(ids) for single images", type(data.val).__name__)
    if answers.right.all():
        log.info("every image was classified correctly")


def _names(data: Data) -> list[str]:
    return data.class_names or [str(number) for number in range(data.num_classes)]


def _write_csv(path: Path, rows: list) -> None:
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows)
    write_atomically(path, lambda file: file.write(text.getvalue().encode()))


def _log_classes(names: list[str], counts: list[int], accuracy: list[float | None]) -> None:
    """Log the accuracy of each class, or of the worst ones if there are many."""
    order = list(range(len(names)))
    if len(names) > LISTED:
        order = sorted((i for i in order if accuracy[i] is not None), key=lambda i: accuracy[i] or 0.0)[:LISTED]
        log.info("the %d classes with the lowest accuracy, of %d:", len(order), len(names))
    width = max(len("class"), *(len(names[i]) for i in order))
    log.info("%-*s  images   top-1", width, "class")
    for i in order:
        share = "     -" if accuracy[i] is None else f"{accuracy[i]:5.1f} %"
        log.info("%-*s  %6d  %s", width, names[i], counts[i], share)


def _log_confusions(names: list[str], matrix: np.ndarray) -> None:
    wrong = matrix - np.diag(np.diag(matrix))
    order = np.argsort(-wrong, axis=None, kind="stable")[:5]
    pairs = [(int(i), int(j)) for i, j in zip(*np.unravel_index(order, wrong.shape), strict=True) if wrong[i, j]]
    if pairs:
        listed = ", ".join(f"{names[i]} as {names[j]} ({wrong[i, j]})" for i, j in pairs)
        log.info("most frequent confusions (true as predicted): %s", listed)


def _draw_confusions(matrix: np.ndarray, names: list[str], path: Path) -> None:
    """Draw the confusion matrix; colors are shares of the true class, numbers are images."""
    from matplotlib.figure import Figure

    count = len(names)
    side = float(np.clip(2 + 0.4 * count, 4, 24))
    figure = Figure(figsize=(side + 1, side), layout="constrained")
    axes = figure.subplots()
    shares = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
    picture = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(picture, ax=axes, label="share of the true class", shrink=0.8)
    axes.set(xlabel="predicted class", ylabel="true class")
    if count <= 60:  # more names would overlap
        axes.set_xticks(range(count), names, rotation=90)
        axes.set_yticks(range(count), names)
    if count <= 30:
        for i, j in zip(*np.nonzero(matrix), strict=True):
            colour = "white" if shares[i, j] > 0.5 else "black"
            axes.text(j, i, str(matrix[i, j]), ha="center", va="center", color=colour, fontsize=8)
    write_atomically(path, lambda file: figure.savefig(file, format="png", dpi=100))


def _draw_images(answers: Answers, data: Data, names: list[str], folder: Path) -> dict[str, Path]:
    """Draw a sample of the images with their answers, and the wrong answers of the highest confidence."""
    rows = {"predictions": spread_sample(answers, DRAWN), "mistakes": worst_mistakes(answers, DRAWN)}
    for name in rows:
        (folder / f"{name}.png").unlink(missing_ok=True)  # of an earlier evaluation
    load: Callable[[list[int]], torch.Tensor] | None = getattr(data.val, "load", None)
    if load is None or UNNUMBERED in answers.ids:
        return {}
    drawn = {}
    for name, chosen in rows.items():
        if len(chosen):
            drawn[name] = folder / f"{name}.png"
            _draw_sheet(answers, chosen, data, names, drawn[name])
    return drawn


def _draw_sheet(answers: Answers, rows: np.ndarray, data: Data, names: list[str], path: Path) -> None:
    ids, loader = answers.ids[rows].tolist(), data.val
    images: torch.Tensor = loader.load(ids)  # type: ignore[attr-defined]  # the caller has checked
    tiles = []
    for row, image, file in zip(rows, images, loader.describe(ids), strict=True):
        predicted, true = names[answers.predicted[row]], names[answers.targets[row]]
        verdict = "right" if answers.right[row] else f"true: {true}"
        lines = f"{predicted}  {100 * answers.confidence[row]:.1f} %", verdict, Path(file).name
        tiles.append((_picture(image, data), lines))
    contact_sheet(tiles, path)


def _picture(image: torch.Tensor, data: Data) -> Image.Image:
    """Return the image that a normalized tensor (C, S, S) shows: with known statistics, else from black to white."""
    known = data.preprocessing or data.file_preprocessing
    if known is not None:
        mean, std = (torch.tensor(known[name]).view(-1, 1, 1) for name in ("mean", "std"))
        image = image * std + mean
    else:
        image = (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8)
    pixels = pixels[:3] if len(pixels) >= 3 else pixels[:1].expand(3, -1, -1)
    return Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())
