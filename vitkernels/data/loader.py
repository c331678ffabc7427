"""The Loader over Samples, with worker processes, exact resume and a limit on unreadable images."""

import logging
import math
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from vitkernels.data.checks import check_common
from vitkernels.data.contract import IGNORE, UNSHARDED, Batch, RawBatch, Shard
from vitkernels.data.device_crops import DeviceCropper
from vitkernels.data.device_transforms import DeviceTransforms
from vitkernels.data.image_source import SourceError
from vitkernels.data.mixing import Mixing
from vitkernels.data.samples import SampleBatches, SampleProblem, Samples
from vitkernels.data.shared_memory import Mappings
from vitkernels.data.workers import dataloader, is_from_dead_worker, iterate, worker_count
from vitkernels.errors import UsageError

MAX_LISTED = 100  # bad images that an error message names


class BadImagesError(RuntimeError):
    """More images of a split could not be read than allowed; `bad_images` maps each path to its reason."""

    code = "data.bad_images"

    def __init__(self, bad_images: dict[str, str], num_samples: int, allowed: int):
        self.bad_images = bad_images
        self.fields = {"bad_images": bad_images, "num_samples": num_samples, "allowed": allowed}
        listed = "".join(f"\n  {path}: {reason}" for path, reason in list(bad_images.items())[:MAX_LISTED])
        more = f"\n  and {len(bad_images) - MAX_LISTED} more" if len(bad_images) > MAX_LISTED else ""
        super().__init__(
            f"{len(bad_images)} of {num_samples} images could not be read, more than the limit of {allowed} "
            f"(max_bad_share). Fix or remove them, or raise max_bad_share:{listed}{more}"
        )


def allowed_bad(share: float, images: int, processes: int) -> int:
    """Return how many unreadable images a process may have: a share of its images, rounded up, and at least one."""
    return max(1, math.ceil(share * images / processes))


class WorkerDiedError(RuntimeError):
    """A worker process ended unexpectedly."""

    code = "data.worker_died"

    def __init__(self, reason: str, batch: int, epoch: int):
        self.fields = {"reason": reason, "batch": batch, "epoch": epoch}
        super().__init__(
            f"a data worker died before batch {batch} of epoch {epoch + 1}: {reason}. The usual cause is a lack of "
            "memory: lower num_workers. The run can be resumed from its newest checkpoint"
        )


class DatasetLoader:
    """The Loader over Samples, through torch's DataLoader; its workers live as long as the loader.

    num_workers: processes that make batches ahead; 0 makes them in the calling process.
    pin_memory: put batches in page-locked memory, for asynchronous copies to an NVIDIA GPU; UsageError without a GPU.
    mixing: Mixup and CutMix for training, None for neither.
    shard: this process's part of each batch.
    max_bad_share: share of the images that a process loads (rounded up, at least one image) that may be unreadable
        before an epoch stops with BadImagesError.
    log: receives unreadable images and warnings, each once.
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
        shard: Shard = UNSHARDED,
        max_bad_share: float = 0.01,
        log: logging.Logger | None = None,
    ):
        check_common(batch_size, seed, pin_memory, num_workers)
        if training and len(samples) < batch_size * shard.world:
            processes = f" on {shard.world} processes" if shard.world > 1 else ""
            raise UsageError(
                f"batch_size={batch_size}{processes} exceeds the {len(samples)} images of the training set, so no "
                f"batch would be full: use batch_size={len(samples) // shard.world} or less",
                code="data.batch_size",
                batch_size=batch_size,
                num_samples=len(samples),
            )
        self.batch_size = batch_size
        self.num_samples = len(samples)
        self.bad_images: dict[str, str] = {}
        self.fallbacks: Counter[str] = Counter()  # samples that the faster decoder left to Pillow, by reason
        self._logged_fallbacks = False
        self._crop: DeviceCropper | None = getattr(samples, "cropper", None)
        self._finish = getattr(samples, "device_transforms", None) or DeviceTransforms()
        self._batches = SampleBatches(samples, batch_size, seed, training, mixing, shard)
        self.batches_per_epoch = self._batches.per_epoch
        self._allowed = allowed_bad(max_bad_share, len(samples), shard.world)
        self._log = log or logging.getLogger(__name__)
        self._warned: set[tuple[str, str]] = set()
        self._keys: list[tuple[int, int]] = []  # (epoch, batch) of the batches to come: the DataLoader's sampler
        self._serial = 0  # of the newest iterator
        self._mappings = Mappings(num_workers)
        self._dataloader = dataloader(self._batches, self._keys, num_workers, pin_memory)
        # finalize holds the DataLoader until this loader dies. If both died in one garbage cycle, the queues to the
        # workers would be destroyed before the workers received the stop signal, and joining each would time out.
        weakref.finalize(self, _release, self._dataloader).atexit = False

    def finish(self, raw: RawBatch) -> Batch:
        """Return (images, targets) of a raw batch that was copied to the device."""
        return self._finish(raw)

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch | RawBatch]:
        """Return the batches of `epoch` from index `start` on; this ends the iterator of an earlier call."""
        if not 0 <= start <= self.batches_per_epoch:
            raise ValueError(f"start={start}: an epoch has batches 0 to {self.batches_per_epoch - 1}")
        self._serial += 1
        self._keys[:] = [(epoch, batch) for batch in range(start, self.batches_per_epoch)]
        batches = iterate(self._dataloader)
        return self._handle_problems(batches, self._serial, epoch, start)

    def sample_ids(self, epoch: int, batch: int, rank: int | None = None) -> list[int]:
        """Return the data set indices of a batch's samples, in row order; of another process if `rank` is given."""
        return self._batches.ids(epoch, batch, rank)

    def describe(self, ids: list[int]) -> list[str]:
        """Return names for these samples, such as paths."""
        return self._batches.samples.describe(ids)

    def advice(self) -> str:
        """Return what would make this loader faster."""
        workers, most = self._dataloader.num_workers, worker_count("auto")
        if workers < most:
            return f"raise num_workers from {workers} to {most}, one per core"
        options = ["cheaper augmentation", "smaller image files", "more cores"]
        decoder = getattr(self._batches.samples, "decoder", None)
        if decoder is not None and decoder.name == "pillow":
            options.insert(0, "decode=turbo (pip install simplejpeg)")
        return f"all {most} cores of this process have a worker; try {', '.join(options)}"

    def load(self, ids: list[int]) -> torch.Tensor:
        """Return the images of these samples, float32 (N, C, S, S), as evaluation sees them."""
        images, targets, _ = self._batches.samples.load(ids, 0)
        if not isinstance(images, dict):
            return images
        if self._crop is not None:
            images = images | {"pixels": self._crop(images["pixels"])[0].cpu()}
        return self.finish({**images, "targets": targets})[0]

    def _handle_problems(self, batches: Iterator, serial: int, epoch: int, batch: int) -> Iterator[Batch | RawBatch]:
        """Yield the batches; log and count their problems."""
        while True:
            if serial != self._serial:
                raise RuntimeError("this iterator ended when epoch() was called again on its loader")
            try:
                made = next(batches)
            except StopIteration:
                self._log_fallbacks()
                return
            except (RuntimeError, ConnectionError, EOFError) as error:
                if not (self._dataloader.num_workers and is_from_dead_worker(error)):
                    raise
                reason = (str(error).splitlines() or [repr(error)])[0].rstrip(" .")
                raise WorkerDiedError(reason, batch, epoch) from error
            if isinstance(made, SourceError):
                raise made
            finished, problems = made
            if problems:
                self._report(problems)
            yield finished if self._crop is None else self._cropped(self._crop, finished, epoch, batch)
            batch += 1

    def _cropped(self, crop: DeviceCropper, raw: dict[str, Any], epoch: int, batch: int) -> RawBatch:
        """Return the batch with pixels computed on the device; rows that no decoder can read hold no sample.

        The partner of such a row in Mixup or CutMix stays unmixed, in its pixels and its target.
        """
        if raw["pixels"].taken is not None:
            self._mappings.keep(raw["pixels"].taken)
        pixels, failed = crop(raw["pixels"])
        raw = raw | {"pixels": pixels}
        unmixed = raw.pop("unmixed_targets", None)
        if failed:
            ids = self.sample_ids(epoch, batch)
            self._report([SampleProblem(ids[f.row], f.reason, unreadable=f.lost, fallback=not f.lost) for f in failed])
            lost = [each.row for each in failed if each.lost]
            targets = raw["targets"] if unmixed is None else unmixed
            targets[lost] = IGNORE
            if lost and unmixed is not None:
                raw |= self._batches.mixed(pixels, unmixed, epoch, batch)
        return raw

    def _log_fallbacks(self) -> None:
        """Log, after the first epoch that ends, how many samples the faster decoder left to Pillow."""
        if self.fallbacks and not self._logged_fallbacks:
            self._logged_fallbacks = True
            counts = ", ".join(f"{count} ({reason})" for reason, count in self.fallbacks.most_common())
            self._log.info("samples decoded by %s in this epoch: %s", self._other_decoder, counts)

    @property
    def _other_decoder(self) -> str:
        """Return the name, for messages, of the decoder of images that the requested one does not support."""
        return "Pillow" if self._crop is None or self._crop.decode is None else "the CPU"

    def _report(self, problems: list[SampleProblem]) -> None:
        names = self.describe([problem.index for problem in problems])
        for name, problem in zip(names, problems, strict=True):
            if problem.fallback:
                if not self.fallbacks[problem.message]:
                    message = "%s decodes %s: %s; similar samples are only counted"
                    self._log.info(message, self._other_decoder, name, problem.message)
                self.fallbacks[problem.message] += 1
            elif not problem.unreadable:
                if (name, problem.message) not in self._warned:
                    self._warned.add((name, problem.message))
                    self._log.warning("%s: %s", name, problem.message)
            elif name not in self.bad_images:
                self.bad_images[name] = problem.message
                self._log.warning(
                    "could not read %s (%s); sample masked (%d unreadable of %d, limit %d)",
                    *(name, problem.message, len(self.bad_images), self.num_samples, self._allowed),
                )
        if len(self.bad_images) > self._allowed:
            raise BadImagesError(self.bad_images, self.num_samples, self._allowed)


def _release(dataloader: DataLoader) -> None:
    """Drop the last reference; the DataLoader's finalizer stops its workers."""
