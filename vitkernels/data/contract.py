"""Interface between data sets and training: loaders whose batches have one shape and depend only on (seed, epoch,
batch).

Shapes: B batch size, C channels, S image side, K classes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch.nn import functional as F

PRESENT = 0.5  # an image has the labels whose target, float32 (B, K), is above this
IGNORE = -100  # the target of a row that holds no sample: F.cross_entropy's ignore_index

Batch = tuple[torch.Tensor, torch.Tensor]
RawBatch = dict[str, torch.Tensor]  # a loader's `finish` turns it into a Batch on the training device


class Loader(Protocol):
    """Batches of one split.

    With several processes each gets its Shard of every batch: batch_size rows of the global world * batch_size.

    A batch is (images, targets) with exactly batch_size rows, or a RawBatch, which the loader's method
    `finish(raw) -> Batch` completes after the copy to the device. images: float32 (B, C, S, S), normalized. targets:
    int64 (B,), or float32 (B, K) if the training set mixes images or has such targets. A row without a sample (padding
    of the last evaluation batch, an unreadable image) has an image of zeros and the target -100, or zeros if targets
    are mixed class numbers.

    Training: an order drawn from (seed, epoch); each image at most once per epoch, and images that fill no batch are
    dropped. Evaluation: all images in order, exactly once. For exact resume each batch must be a function of (seed,
    epoch, batch) alone, not of the number of workers or of earlier batches.
    """

    batch_size: int  # rows per process
    batches_per_epoch: int
    num_samples: int  # images of the split
    bad_images: dict[str, str]  # path -> reason, of the unreadable images met so far

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch | RawBatch]:
        """Return the batches of `epoch` from index `start` on; this ends the iterator of an earlier call."""

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Return the data set indices of a batch's samples, in row order; of another process if `rank` is given."""

    def describe(self, ids: list[int]) -> list[str]:
        """Return names for these samples, such as paths or "digits[17]"."""


@dataclass(frozen=True)
class Data:
    """The loaders of a data set.

    train: None if only evaluation was requested.
    class_names: in the order of the targets, if known. They are saved with the weights.
    preprocessing: the preprocessing of evaluation images if it is configurable, with the keys of
        vitkernels.models.preprocessing.
    targets: kind of the training targets: "classes" (numbers), "distributions" over classes, or "labels": float32 (B,
        K), any number of classes per image, also in the evaluation set. A row without a sample then has -100
        throughout.
    file_preprocessing: the same for image files of other sources, if the data set itself reads none.
    open_plain_train: returns a loader of all training images, in order and without augmentation; None if the
        data set has no such loader or no training images were requested.
    """

    train: Loader | None
    val: Loader
    num_classes: int
    class_names: list[str] | None = None
    preprocessing: dict | None = None
    file_preprocessing: dict | None = None
    targets: Literal["classes", "distributions", "labels"] = "classes"
    open_plain_train: Callable[[], Loader] | None = None


class Shard(NamedTuple):
    """This process's rank among the `world` processes that split every batch."""

    rank: int = 0
    world: int = 1

    def rows(self, batch_size: int) -> list[int]:
        """Return this process's rows of a global batch: half from its front, and their mirror images from its back.

        Mixing pairs row i with its mirror image, so each process holds both rows of its pairs.
        """
        head, tail, end = batch_size // 2, batch_size - batch_size // 2, self.world * batch_size
        front = range(self.rank * head, (self.rank + 1) * head)
        return [*front, *range(end - (self.rank + 1) * tail, end - self.rank * tail)]


UNSHARDED = Shard()  # one process holds all rows


def pad_batch(images: torch.Tensor, targets: torch.Tensor, batch_size: int) -> Batch:
    """Append rows without samples until the batch has batch_size rows; targets are int64 (B,)."""
    padding = batch_size - len(targets)
    return pad_rows(images, padding), pad_rows(targets, padding, IGNORE)


def pad_rows(tensor: torch.Tensor, count: int, value: int = 0) -> torch.Tensor:
    """Append `count` rows of this value along the first dimension."""
    return F.pad(tensor, (0, 0) * (tensor.dim() - 1) + (0, count), value=value) if count else tensor
