"""Handwritten digits: 1797 gray 8×8 images that scikit-learn includes, so nothing is downloaded.

Source: E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998.
Shapes: N images of the split, B rows, C channels, S image side.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from vitkernels.data.checks import check_number, check_range, value_error
from vitkernels.data.contract import Data
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.randomness import Stream, generator
from vitkernels.data.samples import SampleProblem

MEAN, STD = 0.305, 0.376  # of all pixels; 0 is paper and 1 full ink


@dataclass(frozen=True)
class Affine:
    """Random affine transforms, drawn uniformly from ranges as in torchvision's RandomAffine.

    degrees: rotation, ±. translate: shift as a share of the side, ±. scale: (least, greatest) factor.
    """

    degrees: float
    translate: float
    scale: Sequence[float]

    def __post_init__(self) -> None:
        check_number("degrees", self.degrees)
        check_number("translate", self.translate)
        check_range("scale", self.scale)

    def matrices(self, num_samples: int, seed: int, epoch: int) -> torch.Tensor:
        """Return float32 (N, 2, 3) for F.affine_grid, one matrix per sample of an epoch."""
        unit = torch.from_numpy(generator(seed, Stream.SAMPLE, epoch).uniform(-1, 1, (4, num_samples))).float()
        angle = unit[0] * math.radians(self.degrees)
        shift_x, shift_y = unit[1:3] * self.translate * 2  # grid coordinates span 2, from -1 to 1
        least, greatest = self.scale
        zoom = least + (unit[3] + 1) / 2 * (greatest - least)
        cos, sin = angle.cos() / zoom, angle.sin() / zoom
        return torch.stack([cos, -sin, shift_x, sin, cos, shift_y], dim=1).view(num_samples, 2, 3)


class Digits:
    """One split as Samples. A batch is enlarged, transformed and normalized by batched tensor operations."""

    def __init__(
        self,
        numbers: np.ndarray,
        pixels: np.ndarray,
        targets: np.ndarray,
        *,
        image_size: int,
        in_chans: int,
        seed: int,
        affine: Affine | None,
    ) -> None:
        self.numbers = numbers  # (N,) indices in scikit-learn's own order
        self.pixels = torch.from_numpy(pixels[numbers]).float().view(-1, 1, 8, 8) / 16
        self.targets = torch.from_numpy(targets[numbers]).long()  # (N,)
        self.image_size = image_size
        self.in_chans = in_chans
        self.seed = seed
        self.affine = affine

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, ids: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor, list[SampleProblem]]:
        if self.affine is None:
            matrices = torch.eye(2, 3).expand(len(ids), 2, 3)
        else:
            matrices = self.affine.matrices(len(self), self.seed, epoch)[ids]  # (B, 2, 3)
        grid = F.affine_grid(matrices, [len(ids), 1, self.image_size, self.image_size], align_corners=False)
        # Enlarge and transform at once: bicubic in the 8×8 original, with blank paper beyond its edge.
        images = F.grid_sample(self.pixels[ids], grid, mode="bicubic", padding_mode="zeros", align_corners=False)
        images = (images - MEAN) / STD
        return images.repeat(1, self.in_chans, 1, 1), self.targets[ids], []

    def describe(self, ids: list[int]) -> list[str]:
        return [f"digits[{self.numbers[i]}]" for i in ids]


@data_set
def build(
    spec: InputSpec,
    *,
    augment: bool = True,
    degrees: float = 10.0,
    translate: float = 0.1,
    scale: Sequence[float] = (0.9, 1.1),
    mixup: Mapping[str, Any] | None = None,
) -> Data:
    """Return 1437 training and 360 evaluation images of 10 classes, float32 (B, in_chans, image_size, image_size).

    The split is stratified and the same for every seed, so results are comparable.
    augment: rotate, shift and scale training images within degrees, translate and scale (see Affine).
    mixup: settings of vitkernels.data.mixing.Mixing, or None.
    Raises UsageError for invalid values.
    """
    if not isinstance(augment, bool):
        raise value_error("augment", augment, "true or false")
    from sklearn.datasets import load_digits  # takes seconds to import, and workers do not need it
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    numbers = np.arange(len(digits.target))
    train_numbers, val_numbers = train_test_split(numbers, test_size=0.2, random_state=0, stratify=digits.target)
    affine = Affine(degrees, translate, scale) if augment else None
    mixing = spec.mixing(mixup, num_classes=10)

    def samples(split_numbers: np.ndarray, affine: Affine | None) -> Digits:
        size = {"image_size": spec.image_size, "in_chans": spec.in_chans}
        return Digits(split_numbers, digits.data, digits.target, **size, seed=spec.seed, affine=affine)

    return Data(
        train=spec.loader(samples(train_numbers, affine), training=True, mixing=mixing) if spec.train else None,
        val=spec.loader(samples(val_numbers, None), training=False),
        num_classes=10,
        class_names=[str(digit) for digit in range(10)],
        file_preprocessing=_for_files(spec.in_chans),
        open_plain_train=(lambda: spec.loader(samples(train_numbers, None), training=False)) if spec.train else None,
    )


def _for_files(in_chans: int) -> dict[str, Any]:
    """Return the preprocessing of image files (white digits on black), which Pillow enlarges to the same size."""
    statistics = {"mean": [MEAN] * in_chans, "std": [STD] * in_chans}
    return {**statistics, "interpolation": "bicubic", "crop_pct": 1.0, "crop_mode": "center"}
