"""Samples, and which of them form each batch.

Shapes: B rows, C channels, S image side.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Dataset

from vitkernels.data.contract import IGNORE, UNSHARDED, Batch, RawBatch, Shard, pad_rows
from vitkernels.data.device_crops import DeviceCrops
from vitkernels.data.image_source import SourceError
from vitkernels.data.mixing import Mixing
from vitkernels.data.randomness import Stream, generator

Images = torch.Tensor | dict[str, Any]  # a RawBatch, or one whose "pixels" are DeviceCrops


class SampleProblem(NamedTuple):
    """A sample that could not be read, so its row is padding (unreadable), or one that was read with a warning.

    fallback: the message states why Pillow read the sample instead of the faster decoder; it is counted, and logged
        once.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nothing calls
    message: str
    unreadable: bool
    fallback: bool = False


class Samples(Protocol):
    """The images of one split; must be picklable, since worker processes receive it.

    An optional method `order(draw: numpy.random.Generator)` returns the order of a training epoch, int64 (N,), drawn
    from `draw` alone; without it the order is a permutation of all samples.
    """

    def __len__(self) -> int: ...

    def load(self, ids: list[int], epoch: int) -> tuple[Images, torch.Tensor, list[SampleProblem]]:
        """Return images float32 (B, C, S, S), targets int64 (B,) and problems; each row a function of (epoch, id).

        Instead of finished images, a dictionary with "pixels" and with draws, which the attribute `device_transforms`
        (vitkernels.data.device_transforms.DeviceTransforms) finishes on the device.
        A sample that cannot be read has an image of zeros, the target -100 and an unreadable problem.
        """

    def describe(self, ids: list[int]) -> list[str]:
        """Return names for these samples, such as paths."""


@dataclass
class SampleBatches(Dataset):
    """The finished batch of each (epoch, batch): determines the content of a batch, and runs in the workers."""

    samples: Samples
    batch_size: int
    seed: int
    training: bool
    mixing: Mixing | None = None
    shard: Shard = UNSHARDED
    _order: tuple[int, torch.Tensor] | None = field(default=None, init=False)  # the latest epoch and its order

    @property
    def per_epoch(self) -> int:
        full, rest = divmod(len(self.samples), self.batch_size * self.shard.world)
        return full if self.training or not rest else full + 1

    def ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Return the samples of this process's rows, or of process `rank`. All assignment of samples is here."""
        shard = self.shard if rank is None else self.shard._replace(rank=rank)
        first = batch * self.batch_size * shard.world
        places = [first + row for row in shard.rows(self.batch_size) if first + row < len(self.samples)]
        if not self.training:
            return places
        if self._order is None or self._order[0] != epoch:
            draw, order = generator(self.seed, Stream.ORDER, epoch), getattr(self.samples, "order", None)
            permutation = draw.permutation(len(self.samples)) if order is None else order(draw)
            self._order = epoch, torch.from_numpy(permutation)
        return self._order[1][places].tolist()

    def __getitem__(self, key: tuple[int, int]) -> tuple[Batch | RawBatch, list[SampleProblem]] | SourceError:
        epoch, batch = key
        ids = self.ids(epoch, batch)
        try:
            # The last evaluation batch may hold no rows for this process; any sample then supplies the padding's shape.
            images, targets, problems = self.samples.load(ids or [0], epoch)
        except SourceError as error:
            return error  # raised by the loader: an error that a worker raises arrives without its code and fields
        raw: dict[str, Any] = images if isinstance(images, dict) else {"pixels": images}
        if not ids:
            raw, targets, problems = {name: _no_rows(values) for name, values in raw.items()}, targets[:0], []
        padding = self.batch_size - len(targets)
        raw = {name: _padded(values, padding) for name, values in raw.items()}
        targets = pad_rows(targets, padding, IGNORE)
        if self.mixing is not None:
            before = {"unmixed_targets": targets} if isinstance(raw["pixels"], DeviceCrops) else {}
            raw |= before | self.mixed(raw["pixels"], targets, epoch, batch)
        elif isinstance(images, dict):
            raw["targets"] = targets
        else:
            return (raw["pixels"], targets), problems
        return raw, problems

    def mixed(self, pixels: torch.Tensor | DeviceCrops, targets: torch.Tensor, epoch: int, batch: int) -> RawBatch:
        """Return the mixed "targets" of a batch, and the draws that mix its images accordingly."""
        assert self.mixing is not None
        # One mixture per batch is that of the global batch; mixtures per row are drawn by each process.
        number = batch if self.mixing.one_per_batch else batch * self.shard.world + self.shard.rank
        side = pixels.side if isinstance(pixels, DeviceCrops) else pixels.shape[-1]
        targets, draws = self.mixing.draw(targets, side, epoch, number)
        return {**draws, "targets": targets}


def _padded(values: torch.Tensor | DeviceCrops, count: int) -> torch.Tensor | DeviceCrops:
    return values.padded(count) if isinstance(values, DeviceCrops) else pad_rows(values, count)


def _no_rows(values: torch.Tensor | DeviceCrops) -> torch.Tensor | DeviceCrops:
    return DeviceCrops.of([], values.side) if isinstance(values, DeviceCrops) else values[:0]
