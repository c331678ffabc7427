"""Interface of a source of encoded images, such as a folder or shard files.

Shapes: N images of the split.
"""

import time
from typing import Any, Protocol

import numpy as np

_PAUSES = (0.2, 1.0, 3.0)  # seconds between attempts to read an image
_OF_ONE_FILE = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)


def evenly_spaced(total: int, count: int) -> np.ndarray:
    """Return min(total, count) evenly spaced numbers below `total`."""
    return np.linspace(0, total - 1, min(total, count)).round().astype(int)


class SourceError(RuntimeError):
    """The source itself failed, rather than one image: training stops and can be resumed from its checkpoint.

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

        SourceError ends training, and so does an error of the system that lasts (`read_patiently`); after other errors
        the image counts as unreadable.
        """

    def spread(self, count: int) -> list[int]:
        """Return up to `count` evenly spaced images, if possible ones that can be read without waiting."""

    def describe(self, index: int) -> str:
        """Return the name of an image, such as its path."""

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return the order of an epoch of training, int64 (N,); drawn from `draw` alone."""


def read_patiently(source: ImageSource, index: int) -> bytes:
    """Return source.read(index), after several attempts if the system fails, as a network file system does.

    A run that continued without the image would train on other data than a repeated one. Raises SourceError if the last
    attempt fails, and at once what `read` raises if it is about this one file: it does not exist or may not be read.
    """
    for pause in (*_PAUSES, None):
        try:
            return source.read(index)
        except _OF_ONE_FILE:
            raise
        except OSError as error:
            if error.errno is None:  # not an error of the system
                raise
            if pause is None:
                raise cannot_read(source.describe(index), error) from error
        time.sleep(pause)
    raise AssertionError("the last attempt returns or raises")


def cannot_read(path: str, error: OSError) -> SourceError:
    """Return the error that ends training because the system cannot read a file."""
    return SourceError(
        f"cannot read {path} ({type(error).__name__}: {error}). Once it can be read, resume the run from its newest "
        "checkpoint",
        code="data.read",
        path=path,
        reason=str(error),
    )
