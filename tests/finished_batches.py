"""Batches of a loader as training sees them, on the CPU."""

from collections.abc import Iterator

from vitkernels.data import Batch, Loader
from vitkernels.data.device_transforms import finished


def finished_epoch(loader: Loader, number: int, start: int = 0) -> Iterator[Batch]:
    return finished(loader, loader.epoch(number, start))
