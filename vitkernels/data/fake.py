"""Random images, generated once and reused, so that input is never the bottleneck.

Shapes: B batch size, C channels, S image side.
"""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

from vitkernels.data.checks import check_number, usable_cores
from vitkernels.data.contract import IGNORE, UNSHARDED, Batch, Data, Shard
from vitkernels.data.input_spec import InputSpec, data_set
from vitkernels.data.randomness import Stream, generator
from vitkernels.errors import UsageError
from vitkernels.runtime.machine import host_memory_bytes


class PoolLoader:
    """A Loader that cycles through a few ready batches. The tensors are reused: do not write to them.

    pool: full batches, this process's rows of each.
    num_samples: number of images in an epoch.
    last: the padded last batch if images do not fill it; None drops those images, as in training.
    """

    def __init__(
        self,
        pool: list[Batch],
        num_samples: int,
        last: Batch | None = None,
        shard: Shard = UNSHARDED,
    ):
        self.batch_size = len(pool[0][1])
        self.num_samples = num_samples
        self.bad_images: dict[str, str] = {}
        self._pool = pool
        self._last = last
        self._shard = shard
        self._full = num_samples // (self.batch_size * shard.world)  # batches per epoch without padding
        self.batches_per_epoch = self._full + (last is not None)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """Return the batches from index `start` on; every epoch is the same."""
        if not 0 <= start <= self.batches_per_epoch:
            raise ValueError(f"start={start}: an epoch has batches 0 to {self.batches_per_epoch - 1}")
        return (self._batch(batch) for batch in range(start, self.batches_per_epoch))

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Return indices in the pool, which repeat each time the loader cycles through it."""
        shard = self._shard if rank is None else self._shard._replace(rank=rank)
        size = self.batch_size * shard.world
        left = self.num_samples - batch * size
        return [batch % len(self._pool) * size + row for row in shard.rows(self.batch_size) if row < left]

    def describe(self, ids: list[int]) -> list[str]:
        """Return names for these samples."""
        return [f"fake[{i}]" for i in ids]

    def _batch(self, batch: int) -> Batch:
        if batch < self._full:
            return self._pool[batch % len(self._pool)]
        assert self._last is not None
        return self._last


@data_set
def build(
    spec: InputSpec,
    *,
    items: int = 1_000_000,
    val_items: int = 512,
    num_classes: int = 1024,
    pool_batches: int = 4,
) -> Data:
    """Return standard normal images float32 (B, in_chans, image_size, image_size) with random targets.

    items, val_items: number of images in a training epoch and in an evaluation.
    pool_batches: batches generated, from the seed; they stay in memory, page-locked with spec.pin_memory.
    spec.num_workers has no effect, since there is no work to distribute.
    Raises UsageError for invalid values.
    """
    check_number("items", items, integer=True)
    for name, value in (("val_items", val_items), ("num_classes", num_classes), ("pool_batches", pool_batches)):
        check_number(name, value, 1, integer=True)
    batch_size, shard = spec.batch_size, spec.shard
    if spec.train and items < batch_size * shard.world:
        raise UsageError(
            f"items={items} is too few for one batch: use batch_size={items // shard.world} or less, or more items",
            code="data.batch_size",
            batch_size=batch_size,
            num_samples=items,
        )
    rows, image_shape = shard.rows(batch_size), (spec.in_chans, spec.image_size, spec.image_size)
    _check_pool(pool_batches, spec)
    pool = [_random_batch(spec.seed, i, rows, image_shape, num_classes) for i in range(pool_batches)]
    full, rest = divmod(val_items, batch_size * shard.world)
    last = _masked(pool[full % pool_batches], sum(row < rest for row in rows)) if rest else None
    if spec.pin_memory:
        pool = [_pinned(batch) for batch in pool]
        last = last and _pinned(last)
    return Data(
        train=PoolLoader(pool, items, shard=shard) if spec.train else None,
        val=PoolLoader(pool, val_items, last, shard),
        num_classes=num_classes,
    )


def _check_pool(pool_batches: int, spec: InputSpec) -> None:
    """Raise UsageError for more pixels than the host has memory for, before they are drawn."""
    shape = (pool_batches, spec.batch_size, spec.in_chans, spec.image_size, spec.image_size)
    needed, total = 4 * math.prod(shape), host_memory_bytes()
    if total is not None and needed > total:
        raise UsageError(
            f"{pool_batches} batches of {spec.batch_size} images of {spec.image_size} px take {needed / 2**30:,.1f} "
            f"GiB of host memory, and it has {total / 2**30:,.1f} GiB: lower pool_batches, the batch or the image size",
            code="data.value",
            setting="pool_batches",
            value=pool_batches,
            needed_bytes=needed,
            total_bytes=total,
        )


def _random_batch(seed: int, number: int, rows: list[int], image_shape: tuple[int, ...], num_classes: int) -> Batch:
    """Draw each row from its own generator, so that it is the same whichever process or thread draws it."""
    images = np.empty((len(rows), *image_shape), "float32")

    def draw(index: int) -> int:
        rng = generator(seed, Stream.POOL, number, rows[index])
        rng.standard_normal(out=images[index], dtype="float32")  # releases Python's global lock
        return int(rng.integers(num_classes))

    with ThreadPoolExecutor(min(len(rows), usable_cores())) as threads:
        targets = torch.tensor([*threads.map(draw, range(len(rows)))])
    return torch.from_numpy(images), targets


def _masked(batch: Batch, rows: int) -> Batch:
    """Return the batch with only its first `rows` rows; the others are padding."""
    images, targets = batch[0].clone(), batch[1].clone()
    images[rows:] = 0
    targets[rows:] = IGNORE
    return images, targets


def _pinned(batch: Batch) -> Batch:
    return batch[0].pin_memory(), batch[1].pin_memory()
