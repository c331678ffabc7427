"""What every data set hands to the training loop: batches of one shape that depend only on (seed, epoch, batch).

Shapes: B batch size, C channels, S image side, K classes.
"""

import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from vitkernels.data.mixing import Mixing
from vitkernels.data.randomness import Stream, generator
from vitkernels.errors import UsageError

IGNORE = -100  # the target of a row that is no sample: F.cross_entropy's ignore_index
LISTED = 100  # bad images that an error message names

Batch = tuple[torch.Tensor, torch.Tensor]


class Loader(Protocol):
    """Batches of one split.

    Each of several processes gets its Shard of every batch: batch_size rows of the batch's world * batch_size.

    Every batch is (images, targets) with exactly batch_size rows: images float32 (B, C, S, S), normalised; targets
    int64 (B,), or float32 (B, K) when the training set mixes its images. Rows that are no samples (the padding of the
    last evaluation batch, corrupt images) have an image of zeros and the target -100 or, if soft, all zeros.

    Training: an order drawn from (seed, epoch); every image at most once an epoch, for the rest that fills no batch is
    left out. Evaluation: all images in order, exactly once. Each batch is a function of (seed, epoch, batch): not of
    the number of workers, nor of the batches taken before.
    """

    batch_size: int
    batches_per_epoch: int
    num_samples: int  # images of the split
    bad_images: dict[str, str]  # path -> reason, of the images met so far that could not be read

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        """The batches of `epoch`, from the batch with index `start` on; it ends the iterator of an earlier call."""

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Data set indices of the samples in a batch, in the order of its rows; of another process with `rank`."""

    def describe(self, ids: list[int]) -> list[str]:
        """What a person calls these samples: paths, or like "digits[17]"."""


@dataclass(frozen=True)
class Data:
    """The loaders of a data set; train is None where only evaluation was asked for.

    preprocessing: how images are prepared for evaluation, where that is a choice, as vitkernels.models.preprocessing
    has it.
    """

    train: Loader | None
    val: Loader
    num_classes: int
    class_names: list[str] | None = None
    preprocessing: dict | None = None


class BadImagesError(RuntimeError):
    """More images of a split could not be read than was allowed; `bad_images` maps each path to its reason."""

    def __init__(self, bad_images: dict[str, str], num_samples: int, allowed: int):
        self.bad_images = bad_images
        listed = "".join(f"\n  {path}: {reason}" for path, reason in list(bad_images.items())[:LISTED])
        more = f"\n  and {len(bad_images) - LISTED} more" if len(bad_images) > LISTED else ""
        super().__init__(
            f"{len(bad_images)} of {num_samples} images could not be read, more than the {allowed} that "
            f"data.max_bad_share allows. Mend or remove them, or raise the share:{listed}{more}"
        )


class WorkerDiedError(RuntimeError):
    """A process that makes batches ended before its time."""

    def __init__(self, reason: str, batch: int, epoch: int):
        super().__init__(
            f"a data worker died, waited for with batch {batch} of epoch {epoch + 1}: {reason}. Most often memory ran "
            "out: fewer data.num_workers need less. resume=auto goes on from the newest checkpoint"
        )


class Shard(NamedTuple):
    """Which of `world` processes this is, each of which loads its own rows of every batch."""

    rank: int = 0
    world: int = 1

    def rows(self, batch_size: int) -> list[int]:
        """This process's rows of a batch of world * batch_size: as many from its front as mirrored from its back.

        Mixing pairs row i with its mirror image, so each process has both rows of its pairs.
        """
        head, tail, end = batch_size // 2, batch_size - batch_size // 2, self.world * batch_size
        front = range(self.rank * head, (self.rank + 1) * head)
        return [*front, *range(end - (self.rank + 1) * tail, end - self.rank * tail)]


WHOLE = Shard()  # one process: all rows are its own


class Problem(NamedTuple):
    """Something about the sample `index`: it could not be read (then its row is padding), or only a warning."""

    index: int
    message: str
    unreadable: bool


class Samples(Protocol):
    """A data set as the loader needs it; it must pickle, for it is sent to the workers."""

    def __len__(self) -> int: ...

    def load(self, ids: list[int], epoch: int) -> tuple[torch.Tensor, torch.Tensor, list[Problem]]:
        """images float32 (len(ids), C, S, S), targets int64 (len(ids),), problems; each row a function of (epoch, id).

        A sample that cannot be read has an image of zeros, the target -100 and a problem."""

    def describe(self, ids: list[int]) -> list[str]: ...


@dataclass
class Batches(Dataset):
    """The finished batch of each (epoch, batch): all that decides what is in a batch, and what the workers run."""

    samples: Samples
    batch_size: int
    seed: int
    training: bool
    mixing: Mixing | None = None
    shard: Shard = WHOLE
    _order: tuple[int, torch.Tensor] | None = field(default=None, init=False)  # the last epoch asked for, its order

    @property
    def per_epoch(self) -> int:
        whole, rest = divmod(len(self.samples), self.batch_size * self.shard.world)
        return whole if self.training or not rest else whole + 1

    def ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """The one place that deals out the samples, to each of several processes its own (or those of `rank`)."""
        shard = self.shard if rank is None else self.shard._replace(rank=rank)
        first = batch * self.batch_size * shard.world
        places = [first + row for row in shard.rows(self.batch_size) if first + row < len(self.samples)]
        if not self.training:
            return places
        if self._order is None or self._order[0] != epoch:
            permutation = generator(self.seed, Stream.ORDER, epoch).permutation(len(self.samples))
            self._order = epoch, torch.from_numpy(permutation)
        return self._order[1][places].tolist()

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor, list[Problem]]:
        epoch, batch = key
        ids = self.ids(epoch, batch)
        # The last images of an evaluation may all be other processes': then any sample gives the padding its shape.
        images, targets, problems = self.samples.load(ids or [0], epoch)
        if not ids:
            images, targets, problems = images[:0], targets[:0], []
        padding = self.batch_size - len(targets)
        if padding:
            images = F.pad(images, (0, 0, 0, 0, 0, 0, 0, padding))
            targets = F.pad(targets, (0, padding), value=IGNORE)
        if self.mixing is not None:
            # One mixture for the whole batch is that of one process; single rows draw their own.
            number = batch if self.mixing.whole_batch else batch * self.shard.world + self.shard.rank
            images, targets = self.mixing(images, targets, epoch, number)
        return images, targets, problems


class DatasetLoader:
    """The Loader over Samples, through torch's DataLoader; its workers live as long as the loader.

    num_workers: processes that make batches ahead; 0 makes them in the calling process.
    pin_memory: batches in page-locked memory, for asynchronous copies to an NVIDIA GPU; UsageError without one.
    shard: which rows of each batch are this process's, where there are several.
    max_bad_share: share of the images that a process loads (rounded up, at least one image) that may be unreadable
        before an epoch stops with BadImagesError. log: where unreadable images and warnings are named, each once.
    """

    def __init__(
        self,
        samples: Samples,
        *,
        batch_size: int,
        seed: int,
        training: bool,
        num_workers: int = 0,
        pin_memory: bool = False,
        mixing: Mixing | None = None,
        shard: Shard = WHOLE,
        max_bad_share: float = 0.01,
        log: logging.Logger | None = None,
    ):
        check_common(batch_size, seed, pin_memory)
        if training and len(samples) < batch_size * shard.world:
            times = f" on {shard.world} processes" if shard.world > 1 else ""
            raise UsageError(
                f"data.batch_size={batch_size}{times} is more than the {len(samples)} images of the training set, "
                f"so that no batch could be filled: use data.batch_size={len(samples) // shard.world} or less"
            )
        self.batch_size = batch_size
        self.num_samples = len(samples)
        self.bad_images: dict[str, str] = {}
        self._batches = Batches(samples, batch_size, seed, training, mixing, shard)
        self.batches_per_epoch = self._batches.per_epoch
        self._allowed = max(1, math.ceil(max_bad_share * len(samples) / shard.world))
        self._log = log or logging.getLogger(__name__)
        self._warned: set[tuple[str, str]] = set()
        self._keys: list[tuple[int, int]] = []  # (epoch, batch) of the batches to come: the DataLoader's sampler
        self._serial = 0  # of the newest iterator
        self._dataloader = _dataloader(self._batches, self._keys, num_workers, pin_memory)
        # Held from outside until this loader dies: if both died in one garbage cycle, the queues to the workers would
        # be taken apart before the workers were told to stop, and each of them waited for in vain.
        weakref.finalize(self, _let_go, self._dataloader).atexit = False

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        if not 0 <= start <= self.batches_per_epoch:
            raise ValueError(f"start={start}: an epoch has batches 0 to {self.batches_per_epoch - 1}")
        self._serial += 1
        self._keys[:] = [(epoch, batch) for batch in range(start, self.batches_per_epoch)]
        coming = iter(self._dataloader)  # this already sets the workers to work
        return self._strip(coming, self._serial, epoch, start)

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        return self._batches.ids(epoch, batch, rank)

    def describe(self, ids: list[int]) -> list[str]:
        return self._batches.samples.describe(ids)

    def _strip(self, batches: Iterator, serial: int, epoch: int, batch: int) -> Iterator[Batch]:
        """Take the problems out of each batch and deal with them."""
        while True:
            if serial != self._serial:
                raise RuntimeError("this iterator ended when epoch() was called again on its loader")
            try:
                images, targets, problems = next(batches)
            except StopIteration:
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not (self._dataloader.num_workers and _is_of_a_dead_worker(error)):
                    raise
                raise WorkerDiedError(
                    (str(error).splitlines() or [repr(error)])[0].rstrip(" ."), batch, epoch
                ) from error
            batch += 1
            if problems:
                self._report(problems)
            yield images, targets

    def _report(self, problems: list[Problem]) -> None:
        names = self.describe([problem.index for problem in problems])
        for name, problem in zip(names, problems, strict=True):
            if not problem.unreadable:
                if (name, problem.message) not in self._warned:
                    self._warned.add((name, problem.message))
                    self._log.warning("%s: %s", name, problem.message)
            elif name not in self.bad_images:
                self.bad_images[name] = problem.message
                self._log.warning(
                    "cannot read %s (%s): its row is left empty; %d such of %d images so far, %d are allowed",
                    *(name, problem.message, len(self.bad_images), self.num_samples, self._allowed),
                )
        if len(self.bad_images) > self._allowed:
            raise BadImagesError(self.bad_images, self.num_samples, self._allowed)


def _is_of_a_dead_worker(error: Exception) -> bool:
    """Torch says so; but where one dies while it hands over a batch, only their connection is seen to break."""
    if isinstance(error, RuntimeError):
        return str(error).startswith("DataLoader worker (pid")
    return "in DataLoader worker process" not in str(error)  # else the work that it did raised this


def check_common(batch_size: int, seed: int, pin_memory: bool) -> None:
    """UsageError for values that no data set can work with."""
    if batch_size < 1:
        raise UsageError(f"data.batch_size={batch_size}: expected at least 1")
    if seed < 0:
        raise UsageError(f"seed={seed}: expected 0 or more")
    if pin_memory and not torch.cuda.is_available():
        raise UsageError("pin_memory=True needs an NVIDIA GPU, and torch sees none: use pin_memory=False")


def _dataloader(batches: Batches, keys: list[tuple[int, int]], num_workers: int, pin_memory: bool) -> DataLoader:
    """A DataLoader whose items are whole batches (batch_size=None): mixing has to know which batch it is in."""
    # Its own generator: the DataLoader draws a seed for its workers, by default from the training process's stream.
    common = {"batch_size": None, "sampler": keys, "pin_memory": pin_memory, "generator": torch.Generator()}
    if num_workers == 0:
        return DataLoader(batches, **common)
    return DataLoader(
        batches,
        **common,
        num_workers=num_workers,
        persistent_workers=True,
        multiprocessing_context=_process_context(),
        worker_init_fn=_begin_worker,
    )


def _let_go(dataloader: DataLoader) -> None:
    """Drop the last reference; the DataLoader's own end stops its workers."""


def _process_context() -> multiprocessing.context.BaseContext:
    """Workers that inherit neither the threads nor the signal handlers of the training process, as a fork would.

    The fork server imports heavy packages once, for all workers. (Not this project's own: it looks for modules in the
    current folder, and someone else's folder `data` might be there.)
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([name for name in ("torch", "torchvision", "timm.data") if name in sys.modules])
    return context


def _begin_worker(worker: int) -> None:
    # Ctrl-C reaches every process of a terminal; the training process alone decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_training, daemon=True).start()


def _end_with_training() -> None:
    """Torch's own watch is over the parent, the fork server, which in turn outlives a killed training process."""
    multiprocessing.parent_process().join()
    os._exit(1)
