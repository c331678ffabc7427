"""A data set: make `load` read your own images."""

import torch
from torch import Tensor

from vitkernels.data import Data, InputSpec, data_set


class Stripes:
    """Class 0 has horizontal stripes, class 1 vertical ones."""

    def __init__(self, count: int, spec: InputSpec):
        self.count, self.shape = count, (spec.in_chans, spec.image_size, spec.image_size)

    def __len__(self) -> int:
        return self.count

    def load(self, ids: list[int], epoch: int) -> tuple[Tensor, Tensor, list]:
        """Return images (B, C, S, S), class numbers (B,) and the problems of unreadable images."""
        targets = torch.tensor(ids) % 2
        waves = torch.arange(self.shape[-1]).sin().expand(len(ids), *self.shape)
        images = torch.where(targets.view(-1, 1, 1, 1) == 1, waves, waves.mT)
        return images.contiguous(), targets, []

    def describe(self, ids: list[int]) -> list[str]:
        """Return the names that messages about these images contain."""
        return [f"stripes[{i}]" for i in ids]


@data_set
def build(spec: InputSpec, *, items: int = 320) -> Data:
    """Build the data set with the settings of conf/data/mine.yaml."""
    train = spec.loader(Stripes(items, spec), training=True) if spec.train else None
    return Data(train, spec.loader(Stripes(100, spec), training=False), num_classes=2)
