"""Random images, made once and handed out again and again, so that the input never limits what is measured.

Shapes: B batch size, C channels, S image side.
"""

from collections.abc import Iterator

import numpy as np
import torch

from vitkernels.data.checks import check_number
from vitkernels.data.loader import IGNORE, WHOLE, Batch, Data, Shard, check_common
from vitkernels.data.randomness import Stream, generator
from vitkernels.errors import UsageError


class PoolLoader:
    """A Loader over a few ready batches, in turn. They are the same tensors each time: do not write into them.

    pool: full batches, of each this process's rows. num_samples: images that an epoch counts. last: the last batch
    where the images do not fill it, padded; None to leave those images out, as in training.
    """

    def __init__(
        self,
        pool: list[Batch],
        num_samples: int,
        last: Batch | None = None,
        shard: Shard = WHOLE,
    ):
        self.batch_size = len(pool[0][1])
        self.num_samples = num_samples
        self.bad_images: dict[str, str] = {}
        self._pool = pool
        self._last = last
        self._shard = shard
        self._whole = num_samples // (self.batch_size * shard.world)  # batches an epoch without padding
        self.batches_per_epoch = self._whole + (last is not None)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if not 0 <= start <= self.batches_per_epoch:
            raise ValueError(f"start={start}: an epoch has batches 0 to {self.batches_per_epoch - 1}")
        return (self._batch(batch) for batch in range(start, self.batches_per_epoch))

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Indices in the pool: a sample comes back with every round through it."""
        shard = self._shard if rank is None else self._shard._replace(rank=rank)
        size = self.batch_size * shard.world
        left = self.num_samples - batch * size
        return [batch % len(self._pool) * size + row for row in shard.rows(self.batch_size) if row < left]

    def describe(self, ids: list[int]) -> list[str]:
        return [f"fake[{i}]" for i in ids]

    def _batch(self, batch: int) -> Batch:
        return self._pool[batch % len(self._pool)] if batch < self._whole else self._last


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
    items: int = 1_000_000,
    val_items: int = 512,
    num_classes: int = 1024,
    pool_batches: int = 4,
) -> Data:
    """Standard normal images float32 (batch_size, in_chans, image_size, image_size) with random targets.

    items, val_items: images that an epoch of training and an evaluation count. pool_batches: batches made, from the
    seed; they stay in memory, page-locked if pin_memory. num_workers starts nothing: there is no work to share out; it
    is taken so that one command line fits every data set. train=False leaves out the training set. shard: the rows of
    each batch that this process gets.
    Raises UsageError for values that cannot work.
    """
    check_common(batch_size, seed, pin_memory)
    check_number("items", items, whole=True)
    for name, value in (("val_items", val_items), ("num_classes", num_classes), ("pool_batches", pool_batches)):
        check_number(name, value, 1, whole=True)
    if train and items < batch_size * shard.world:
        most = items // shard.world
        raise UsageError(f"data.items={items} fills no batch: use data.batch_size={most} or less, or more items")
    rows, image_shape = shard.rows(batch_size), (in_chans, image_size, image_size)
    pool = [_random_batch(seed, i, rows, image_shape, num_classes) for i in range(pool_batches)]
    whole, rest = divmod(val_items, batch_size * shard.world)
    last = _padded(pool[whole % pool_batches], sum(row < rest for row in rows)) if rest else None
    if pin_memory:
        pool = [_pinned(batch) for batch in pool]
        last = last and _pinned(last)
    return Data(
        train=PoolLoader(pool, items, shard=shard) if train else None,
        val=PoolLoader(pool, val_items, last, shard),
        num_classes=num_classes,
    )


def _random_batch(seed: int, number: int, rows: list[int], image_shape: tuple[int, ...], num_classes: int) -> Batch:
    """Each row has numbers of its own, so that it is the same whichever process makes it."""
    generators = [generator(seed, Stream.POOL, number, row) for row in rows]
    images = torch.from_numpy(np.stack([rng.standard_normal(image_shape, dtype="float32") for rng in generators]))
    targets = torch.tensor([int(rng.integers(num_classes)) for rng in generators])
    return images, targets


def _padded(batch: Batch, rows: int) -> Batch:
    """The batch with only its first `rows` rows; the others are padding."""
    images, targets = batch[0].clone(), batch[1].clone()
    images[rows:] = 0
    targets[rows:] = IGNORE
    return images, targets


def _pinned(batch: Batch) -> Batch:
    return batch[0].pin_memory(), batch[1].pin_memory()
