"""Handwritten digits: 1797 grey images of 8×8 that come with scikit-learn, so nothing has to be downloaded.

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

from vitkernels.data.checks import check_number, check_range
from vitkernels.data.loader import WHOLE, Data, DatasetLoader, Problem, Shard
from vitkernels.data.mixing import build_mixing
from vitkernels.data.randomness import Stream, generator
from vitkernels.errors import UsageError

MEAN, STD = 0.305, 0.376  # of all pixels, where 0 is paper and 1 is full ink


@dataclass(frozen=True)
class Affine:
    """Ranges that are drawn from uniformly, as in torchvision's RandomAffine.

    degrees: rotation in ±degrees. translate: shift in ±shares of the image's side. scale: (least, greatest) factor.
    """

    degrees: float
    translate: float
    scale: Sequence[float]

    def __post_init__(self):
        check_number("degrees", self.degrees)
        check_number("translate", self.translate)
        check_range("scale", self.scale)

    def matrices(self, num_samples: int, seed: int, epoch: int) -> torch.Tensor:
        """float32 (N, 2, 3) for F.affine_grid, one for each sample of an epoch."""
        unit = torch.from_numpy(generator(seed, Stream.SAMPLE, epoch).uniform(-1, 1, (4, num_samples))).float()
        angle = unit[0] * math.radians(self.degrees)
        shift_x, shift_y = unit[1:3] * self.translate * 2  # the grid's coordinates span 2, from -1 to 1
        least, greatest = self.scale
        zoom = least + (unit[3] + 1) / 2 * (greatest - least)
        cos, sin = angle.cos() / zoom, angle.sin() / zoom
        return torch.stack([cos, -sin, shift_x, sin, cos, shift_y], dim=1).view(num_samples, 2, 3)


class Digits:
    """One split as loader.Samples. A whole batch is enlarged, moved and normalised in one tensor operation."""

    def __init__(self, numbers, pixels, targets, *, image_size: int, in_chans: int, seed: int, affine: Affine | None):
        self.numbers = numbers  # (N,) indices in scikit-learn's own order
        self.pixels = torch.from_numpy(pixels[numbers]).float().view(-1, 1, 8, 8) / 16
        self.targets = torch.from_numpy(targets[numbers]).long()  # (N,)
        self.image_size = image_size
        self.in_chans = in_chans
        self.seed = seed
        self.affine = affine

    def __len__(self) -> int:
        return len(self.targets)

    def load(self, ids: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor, list[Problem]]:
        if self.affine is None:
            matrices = torch.eye(2, 3).expand(len(ids), 2, 3)
        else:
            matrices = self.affine.matrices(len(self), self.seed, epoch)[ids]  # (B, 2, 3)
        grid = F.affine_grid(matrices, (len(ids), 1, self.image_size, self.image_size), align_corners=False)
        # Enlarged and moved at once: bicubic in the 8×8 original, with blank paper beyond its edge.
        images = F.grid_sample(self.pixels[ids], grid, mode="bicubic", padding_mode="zeros", align_corners=False)
        images = (images - MEAN) / STD
        return images.repeat(1, self.in_chans, 1, 1), self.targets[ids], []

    def describe(self, ids: list[int]) -> list[str]:
        return [f"digits[{self.numbers[i]}]" for i in ids]


def build(
    *,
    image_size: int,
    in_chans: int,
    seed: int,
    batch_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
    train: bool = True,
    shard: Shard = WHOLE,
    augment: bool = True,
    degrees: float = 10.0,
    translate: float = 0.1,
    scale: Sequence[float] = (0.9, 1.1),
    mixup: Mapping[str, Any] | None = None,
) -> Data:
    """Images float32 (batch_size, in_chans, image_size, image_size); 1437 for training, 360 for evaluation, 10 classes.

    The split is stratified and the same for every seed, so that results compare. train=False leaves out the training
    set. shard: the rows of each batch that this process loads.
    augment: rotate, shift and scale the training images within degrees, translate and scale (see Affine).
    mixup: settings of vitkernels.data.mixing.Mixing, or None. Raises UsageError for values that cannot work.
    """
    if not isinstance(augment, bool):
        raise UsageError(f"data.augment={augment}: expected true or false")
    from sklearn.datasets import load_digits  # takes seconds to import, and the workers need none of it
    from sklearn.model_selection import train_test_split

    digits = load_digits()
    numbers = np.arange(len(digits.target))
    train_numbers, val_numbers = train_test_split(numbers, test_size=0.2, random_state=0, stratify=digits.target)
    affine = Affine(degrees, translate, scale) if augment else None
    mixing = build_mixing(mixup, num_classes=10, seed=seed, batch_size=batch_size)

    def loader(split_numbers: np.ndarray, affine: Affine | None, **kwargs) -> DatasetLoader:
        samples = Digits(
            split_numbers,
            digits.data,
            digits.target,
            image_size=image_size,
            in_chans=in_chans,
            seed=seed,
            affine=affine,
        )
        return DatasetLoader(
            samples,
            batch_size=batch_size,
            seed=seed,
            num_workers=num_workers,
            pin_memory=pin_memory,
            shard=shard,
            **kwargs,
        )

    return Data(
        train=loader(train_numbers, affine, training=True, mixing=mixing) if train else None,
        val=loader(val_numbers, None, training=False),
        num_classes=10,
        class_names=[str(digit) for digit in range(10)],
    )
