"""Interface of a source of encoded images, such as a folder or shard files.

Shapes: N images of the split.
"""

from typing import Any, Protocol

import numpy as np


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """Return min(total, count) evenly spaced numbers below `total`."""
    return np.linspace(0, total - 1, min(total, count)).round().astype(int)


class SourceError(RuntimeError):
    """The source failed, not a single image: training stops, and can be resumed from its checkpoint.

    code, fields: as a UsageError's.
    """

    def __init__(self, message: str, *, code: str = "data.source", **fields: Any):
        super().__init__(message)
        self.code = code
        self.fields = fields


class ImageSource(Protocol):
    """The encoded images of one split; must be picklable, since worker processes receive it."""

    @property
    def name(self) -> str:
        """The split's name in messages."""

    @property
    def targets(self) -> np.ndarray:
        """The classes, int64 (N,), or a number from 0 to 1 for each image and class, float32 (N, K)."""

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Return the bytes of an encoded image, or its first `limit` bytes. Safe to call from several threads.

        SourceError ends training; after other errors the image counts as unreadable.
        """

    def spread(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced images, if possible ones that can be read without waiting."""

    def describe(self, index: int) -> str:
        """Return the name of an image, such as its path."""

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return the order of an epoch of training, int64 (N,); drawn from `draw` alone."""
