"""A model's prediction for each image, and the figures that follow from it: per-class accuracy, confusions,
calibration.

Shapes: N images, K classes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from vitkernels.data import IGNORE, Loader
from vitkernels.parallel import Parallel

BINS = 15  # of Guo et al. 2017

UNNUMBERED = -1

BatchAnswers = tuple[Tensor, Tensor, Tensor]  # targets, predicted classes, confidences of the rows of one batch


@dataclass(frozen=True)
class Answers:
    """The prediction for each image, identified by its index in the data set.

    ids, targets, predicted: int64 (N,); an id is UNNUMBERED if the loader does not number its samples.
    confidence: float64 (N,), the probability of the predicted class.
    """

    ids: np.ndarray
    targets: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray

    @property
    def right(self) -> np.ndarray:
        return self.predicted == self.targets


def collect(batches: Sequence[BatchAnswers], loader: Loader, parallel: Parallel) -> Answers:
    """Return the answers of all processes, sorted by image. All processes must call this; it waits for the device."""
    rows: list[tuple[int, int, int, float]] = []
    for number, (targets, predicted, confidence) in enumerate(batches):
        ids = loader.sample_ids(0, number)
        ids += [UNNUMBERED] * (len(targets) - len(ids))  # padding, or a stream
        values = targets.tolist(), predicted.tolist(), confidence.tolist()
        rows += [row for row in zip(ids, *values, strict=True) if row[1] != IGNORE]
    found = sorted(row for share in parallel.shares(rows) for row in share)
    columns = list(zip(*found, strict=True)) or [()] * 4
    ints = [np.array(column, dtype=np.int64) for column in columns[:3]]
    return Answers(ints[0], ints[1], ints[2], np.array(columns[3], dtype=np.float64))


def confusion_matrix(answers: Answers, num_classes: int) -> np.ndarray:
    """Return the number of images of each true class (row) and predicted class (column), int64 (K, K)."""
    pairs = answers.targets * num_classes + answers.predicted
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def per_class_accuracy(matrix: np.ndarray) -> list[float | None]:
    """Return the accuracy of each class in percent; None for a class without images."""
    return [100 * float(row[i]) / int(row.sum()) if row.sum() else None for i, row in enumerate(matrix)]


def expected_calibration_error(answers: Answers, bins: int = BINS) -> float:
    """Return the expected calibration error in percentage points.

    Images are binned by confidence, in `bins` intervals of equal width (low, high]; the error is the mean over images
    of their bin's |accuracy - mean confidence|. Guo et al., "On Calibration of Modern Neural Networks", ICML 2017,
    equation 3.
    """
    number = np.clip(np.ceil(answers.confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(number, answers.right - answers.confidence, minlength=bins)  # count * (accuracy - confidence)
    return 100 * float(np.abs(gap).sum()) / len(answers.ids)


def worst_mistakes(answers: Answers, most: int) -> np.ndarray:
    """Return the rows of wrong answers, the most confident first."""
    wrong = np.flatnonzero(~answers.right)
    return wrong[np.argsort(-answers.confidence[wrong], kind="stable")][:most]


def spread_sample(answers: Answers, most: int) -> np.ndarray:
    """Return rows at equal distances, which for images in the order of their classes shows all classes."""
    count = min(most, len(answers.ids))
    return np.linspace(0, len(answers.ids) - 1, count).round().astype(int)
