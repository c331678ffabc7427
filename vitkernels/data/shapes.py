"""Textured shapes on a noisy background, generated on the training device: a task that needs no download.

Image i is a function of i alone, so there is nothing to download or to store, and epochs may be of any length. A class
is one of eight shapes with one of four textures; place, size, rotation, colors and noise vary. Shapes: B rows, S image
side, N numbers that describe an image.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitkernels.data.checks import check_number
from vitkernels.data.contract import Batch, Data, RawBatch
from vitkernels.data.device_transforms import hashed_normal
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.samples import SampleProblem
from vitkernels.errors import UsageError

SHAPES = ("disk", "square", "triangle", "ring", "cross", "hexagon", "half disk", "crescent")
TEXTURES = ("plain", "striped", "checked", "ringed")
CLASSES = [f"{texture} {shape}" for shape in SHAPES for texture in TEXTURES]
NUMBERS = 20
VAL_BEGIN = 2**40  # images of the evaluation set have numbers from here on
_MEAN, _STD = 0.5, 0.3


def uniform_numbers(images: np.ndarray, count: int) -> np.ndarray:
    """Return `count` uniform numbers in [0, 1) for each image's number, float32 (B, count).

    The bits are those of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), seeded by the image's number.
    """
    counter = np.arange(1, count + 1, dtype=np.uint64)
    x: np.ndarray = images.astype(np.uint64)[:, None] * np.uint64(count) + counter
    x = x * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) >> np.uint64(40)).astype(np.float32) / np.float32(2**24)


class ShapeSamples:
    """One split as Samples, whose raw batches hold the numbers that describe the images.

    begin: number of the first image. count: number of images in the split. side: of an image, in pixels.
    """

    def __init__(self, begin: int, count: int, side: int):
        self.begin, self.count = begin, count
        self.device_transforms = Drawing(side)

    def __len__(self) -> int:
        return self.count

    def load(self, ids: list[int], epoch: int) -> tuple[RawBatch, Tensor, list[SampleProblem]]:
        images = np.asarray(ids, dtype=np.int64) + self.begin
        targets = torch.from_numpy(images % len(CLASSES))
        raw = {"numbers": torch.from_numpy(uniform_numbers(images, NUMBERS)), "classes": targets}
        return raw | {"noise_seed": torch.from_numpy(images & 0x7FFFFFFF)}, targets, []

    def describe(self, ids: list[int]) -> list[str]:
        return [f"shapes[{self.begin + i}]" for i in ids]


@dataclass(frozen=True)
class Drawing:
    """Draws raw batches as images float32 (B, 3, S, S) of mean 0, on the device that holds them."""

    side: int

    def __call__(self, raw: RawBatch) -> Batch:
        numbers, targets = raw["numbers"], raw["targets"]
        x, y, radius = _place(numbers, self.side)
        shape, texture = raw["classes"] // len(TEXTURES), raw["classes"] % len(TEXTURES)
        distance = _distances(x, y).gather(1, _index(shape, self.side))
        # Edges are one pixel wide; `distance` is in radii.
        inside = (0.5 - distance * radius * (self.side / 2)).clamp(0, 1)
        marked = _textures(x, y, numbers).gather(1, _index(texture, self.side))
        ground, waves, paint, second = _colors(numbers, self.side)
        image = torch.lerp(ground + waves, torch.where(marked > 0, second, paint), inside)
        image = image + 0.1 * hashed_normal(raw["noise_seed"], image.shape)
        return ((image - _MEAN) / _STD).masked_fill((targets < 0).view(-1, 1, 1, 1), 0.0), targets


def _column(numbers: Tensor, index: int) -> Tensor:
    return numbers[:, index].view(-1, 1, 1, 1)


def _index(choice: Tensor, side: int) -> Tensor:
    return choice.view(-1, 1, 1, 1).expand(-1, 1, side, side)


def _grid(side: int, device: torch.device) -> Tensor:
    """Return pixel centers in -1 to 1, (S,)."""
    return (torch.arange(side, device=device) + 0.5) * (2 / side) - 1


def _place(numbers: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return each pixel's coordinates in the shape's own frame, (B, 1, S, S), and the shape's radius, (B, 1, 1, 1)."""
    radius = 0.35 + 0.3 * _column(numbers, 0)
    margin = 1 - radius
    center_x, center_y = (margin * (2 * _column(numbers, i) - 1) for i in (1, 2))
    angle = 2 * math.pi * _column(numbers, 3)
    grid = _grid(side, numbers.device)
    x, y = grid.view(1, 1, 1, -1) - center_x, grid.view(1, 1, -1, 1) - center_y
    cos, sin = angle.cos() / radius, angle.sin() / radius
    return x * cos + y * sin, y * cos - x * sin, radius


def _distances(x: Tensor, y: Tensor) -> Tensor:
    """Return how far each pixel lies outside of each shape, negative inside, (B, 8, S, S); the unit is the radius."""
    across, down, norm = x.abs(), y.abs(), torch.hypot(x, y)
    return torch.cat(
        [
            norm - 1,
            torch.maximum(across, down) - 0.8,
            torch.maximum(0.866 * across + 0.5 * y, -y) - 0.6,
            (norm - 0.75).abs() - 0.25,
            torch.minimum(
                torch.maximum(across - 0.95, down - 0.3), torch.maximum(down - 0.95, across - 0.3)
            ),
            torch.maximum(0.866 * across + 0.5 * down, down) - 0.85,
            torch.maximum(norm - 1, y),
            torch.maximum(norm - 1, 0.75 - torch.hypot(x - 0.6, y)),
        ],
        dim=1,
    )  # fmt: skip


def _textures(x: Tensor, y: Tensor, numbers: Tensor) -> Tensor:
    """Return where each texture has its second color: positive values, (B, 4, S, S)."""
    frequency = 5 + 4 * _column(numbers, 4)
    phase = 2 * math.pi * _column(numbers, 5)
    stripes = (frequency * x + phase).sin()
    checks = stripes * (frequency * y + phase).sin()
    rings = (1.5 * frequency * torch.hypot(x, y) + phase).sin()
    return torch.cat([torch.full_like(x, -1.0), stripes, checks, rings], dim=1)


def _colors(numbers: Tensor, side: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the ground's color, its waves, and the shape's two colors, which differ from the ground and each other."""
    ground = numbers[:, 6:9].view(-1, 3, 1, 1)
    paint = (ground + 0.3 + 0.2 * numbers[:, 9:12].view(-1, 3, 1, 1)) % 1
    second = (paint + 0.3 + 0.2 * numbers[:, 12:15].view(-1, 3, 1, 1)) % 1
    grid = _grid(side, numbers.device)
    across, down = (12 * (2 * _column(numbers, i) - 1) for i in (15, 16))
    phase = 2 * math.pi * _column(numbers, 17)
    waves = 0.15 * (across * grid.view(1, 1, 1, -1) + down * grid.view(1, 1, -1, 1) + phase).sin()
    return ground, waves, paint, second


@data_set
def build(spec: InputSpec, *, items: int = 1_000_000, val_items: int = 8192) -> Data:
    """Return images float32 (B, 3, image_size, image_size) of 32 classes, equally often, the same for every seed.

    items, val_items: images of a training epoch and of an evaluation; no image is in both.
    Raises UsageError for invalid values.
    """
    for name, value in (("items", items), ("val_items", val_items)):
        check_number(name, value, 1, integer=True)
    if spec.in_chans != 3:
        raise UsageError(
            f"in_chans={spec.in_chans}: the shapes have colors, so the model needs in_chans=3",
            code="data.in_chans",
            in_chans=spec.in_chans,
        )
    train, val = ShapeSamples(0, items, spec.image_size), ShapeSamples(VAL_BEGIN, val_items, spec.image_size)
    return Data(
        train=spec.loader(train, training=True) if spec.train else None,
        val=spec.loader(val, training=False),
        num_classes=len(CLASSES),
        class_names=CLASSES,
        open_plain_train=(lambda: spec.loader(train, training=False)) if spec.train else None,
    )
