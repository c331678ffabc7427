"""Encoded images from any source as Samples, with the settings that all such data sets share.

Shapes: B rows, S image side, N images of a split.
"""

import io
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from vitkernels.data.augment import DrawnImage, EvalPreprocessing, PreparedImage, TrainAugmentation
from vitkernels.data.batch_memory import CropBatch, PixelBatch
from vitkernels.data.checks import as_list, check_number, is_numbers, value_error
from vitkernels.data.contract import IGNORE, Data
from vitkernels.data.decode import Decoder, ImageFile, choose_decoder, why_unreadable
from vitkernels.data.decode.gpu import FileDecoder, file_decoder
from vitkernels.data.device_crops import DeviceCropper
from vitkernels.data.device_transforms import DeviceTransforms, has_triton
from vitkernels.data.headers import check_headers
from vitkernels.data.image_source import ImageSource, SourceError, read_patiently
from vitkernels.data.input_spec import InputSpec
from vitkernels.data.loader import DatasetLoader, allowed_bad
from vitkernels.data.randomness import Stream, seeded_globals
from vitkernels.data.samples import SampleProblem
from vitkernels.data.shared_memory import RecycledMemory
from vitkernels.errors import UsageError

Result = TypeVar("Result")
_DRAWN_TOGETHER = 8  # images; a worker holds their files

# The values of most ImageNet models.
PREPROCESSING = {
    "mean": list(IMAGENET_DEFAULT_MEAN),
    "std": list(IMAGENET_DEFAULT_STD),
    "interpolation": "bicubic",
    "crop_pct": 0.9,
    "crop_mode": "center",
}


class Prepare(Protocol):
    """Prepares an image in a worker.

    is_random: whether it draws from the global generators.
    """

    is_random: bool

    @property
    def needs_worker(self) -> str | None:
        """Return why images must be prepared in a worker; None if the device can prepare them too."""

    def draw(self, image: ImageFile, decoder: Decoder) -> DrawnImage: ...


class ImageSamples:
    """The images of one split, as Samples.

    source: the encoded images. prepare: prepares an image in a worker.
    """

    def __init__(
        self,
        source: ImageSource,
        prepare: Prepare,
        decoder: Decoder,
        device_transforms: DeviceTransforms,
        *,
        seed: int,
        cropper: DeviceCropper | None = None,
        device_share: float = 1.0,
    ):
        self.source = source
        self.prepare = prepare
        self.decoder = decoder
        self.device_transforms = device_transforms
        self.seed = seed
        self.cropper = cropper
        self.device_share = device_share
        self._memory = RecycledMemory()
        self._blank = self._prepare_blank()
        assert isinstance(self._blank.pixels, torch.Tensor), "Pillow's images are resized in the worker"
        self._side = self._blank.pixels.shape[-1]

    def __len__(self) -> int:
        return len(self.source.targets)

    def load(self, ids: list[int], epoch: int) -> tuple[dict[str, Any], torch.Tensor, list[SampleProblem]]:
        images = self._new_batch(len(ids))
        draws = [self._blank.draws] * len(ids)
        problems, read = [], []
        for row, (image, found) in enumerate(self._prepared(ids, epoch)):
            images.put(None if image is None else image.pixels)
            problems += found
            if image is not None:
                draws[row] = image.draws
                read.append(row)
        known = self.source.targets[[ids[row] for row in read]]
        dtype = torch.int64 if known.ndim == 1 else torch.float32
        targets = torch.full((len(ids), *known.shape[1:]), IGNORE, dtype=dtype)
        targets[read] = torch.as_tensor(known, dtype=dtype)
        stacked = {name: torch.stack([each[name] for each in draws]) for name in self._blank.draws}
        return {"pixels": images.finished(), **stacked}, targets, problems

    def _prepared(self, ids: list[int], epoch: int) -> Iterator[tuple[PreparedImage | None, list[SampleProblem]]]:
        """Yield each image, or None if the file cannot be read, and the problems found."""
        for first in range(0, len(ids), _DRAWN_TOGETHER):
            together = ids[first : first + _DRAWN_TOGETHER]
            # Decoding evicts all code from the processor's caches, so the rest is done for several images at once.
            opened = [_attempted(index, partial(self._opened, epoch, index)) for index in together]
            for index in together:
                found, problems = opened.pop(0)  # so that no more than one decoded image is held
                if found is None:
                    yield None, problems
                    continue
                image, drawn = found
                prepared, problems = _attempted(index, drawn.prepared)
                yield prepared, problems if prepared is None else _remarks(index, image)

    def _opened(self, epoch: int, index: int) -> tuple[ImageFile, DrawnImage]:
        decoder = self._decoder_of(epoch, index)
        image = decoder.open(read_patiently(self.source, index))
        with self._seeded(epoch, index):
            return image, self.prepare.draw(image, decoder)

    def _new_batch(self, rows: int) -> PixelBatch | CropBatch:
        if self.cropper is None:
            return PixelBatch(rows, self._side)
        return CropBatch(rows, self._side, self._memory if self.cropper.decode is None else None)

    def _seeded(self, *key: int) -> AbstractContextManager[None]:
        """Seed the global generators, unless nothing draws from them: that takes 4 % of a worker's time."""
        return seeded_globals(self.seed, Stream.SAMPLE, *key) if self.prepare.is_random else nullcontext()

    def _decoder_of(self, epoch: int, index: int) -> Decoder:
        """Return the decoder of an image, which depends only on the arguments and the seed."""
        if self.device_share == 1 or self.decoder.in_worker is self.decoder:
            return self.decoder
        drawn = zlib.crc32(f"{self.seed} {epoch} {index}".encode()) / 2**32
        return self.decoder if drawn < self.device_share else self.decoder.in_worker

    @property
    def targets_are_classes(self) -> bool:
        """Return whether targets are class numbers, int64 (N,), rather than float32 (N, K)."""
        return self.source.targets.ndim == 1

    def order(self, draw: np.random.Generator) -> np.ndarray:
        """Return the order of an epoch of training."""
        return self.source.order(draw)

    def describe(self, ids: list[int]) -> list[str]:
        return [self.source.describe(i) for i in ids]

    def _prepare_blank(self) -> PreparedImage:
        """Prepare a black image, for the draws' names and shapes."""
        file, decoder = io.BytesIO(), Decoder("pillow")
        Image.new("RGB", (64, 64)).save(file, "png")
        with self._seeded():
            return self.prepare.draw(decoder.open(file.getvalue()), decoder).prepared()


def _attempted(index: int, function: Callable[[], Result]) -> tuple[Result | None, list[SampleProblem]]:
    """Return the function's result for an image; None and the problem if its file cannot be read."""
    try:
        return function(), []
    except SourceError:
        raise
    except Exception as error:  # a broken file can make a decoder raise almost anything
        return None, [SampleProblem(index, why_unreadable(error), unreadable=True)]


def _remarks(index: int, image: ImageFile) -> list[SampleProblem]:
    """Return the warnings of a decoded image, and why Pillow decoded it, if it did."""
    problems = [SampleProblem(index, warning, unreadable=False) for warning in image.warnings]
    if image.fallback is not None:
        problems.append(SampleProblem(index, image.fallback, unreadable=False, fallback=True))
    return problems


@dataclass(frozen=True)
class ImageSettings:
    """The settings of every data set of encoded images; conf/data/imagefolder.yaml explains them.

    Those of PREPROCESSING that are None take its values.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    interpolation: str | None = None
    crop_pct: float | None = None
    crop_mode: str | None = None
    scale: Sequence[float] = (0.08, 1.0)
    ratio: Sequence[float] = (3 / 4, 4 / 3)
    hflip: float = 0.5
    color_jitter: float | None = None
    auto_augment: str | None = None
    re_prob: float = 0.0
    re_mode: str = "pixel"
    re_count: int = 1
    mixup: Mapping[str, Any] | None = None
    check_images: int | None = 20_000
    small_images: str = "upscale"
    max_bad_share: float = 0.01
    decode: str = "auto"
    cuda_share: float = 1.0

    def build(
        self,
        spec: InputSpec,
        open_sources: Callable[[], tuple[Mapping[str, ImageSource], int, list[str] | None]],
        log: logging.Logger,
    ) -> Data:
        """Return loaders of images float32 (B, 3, image_size, image_size).

        open_sources: returns the sources "val" and, with spec.train, "train", the number of classes, and their names if
            known. It is called once the settings are checked. Raises UsageError for invalid settings.
        """
        check_number("check_images", self.check_images, integer=True, null=True)
        check_number("max_bad_share", self.max_bad_share, 0, 1)
        given = {name: getattr(self, name) for name in PREPROCESSING}
        prepared, prepared_eval = _preprocessing(spec.in_chans, given)
        names = ("scale", "ratio", "hflip", "color_jitter", "auto_augment", "re_prob", "re_mode", "re_count")
        augmentation: dict[str, Any] = {name: getattr(self, name) for name in names}
        augmentation |= {name: prepared[name] for name in ("mean", "interpolation")}
        resize = {name: value for name, value in prepared_eval.items() if name != "std"}
        check_number("cuda_share", self.cuda_share, 0, 1)
        decoder = choose_decoder(self.decode, on_gpu=spec.pin_memory)
        on_device = _device_augments(spec.pin_memory)
        train = TrainAugmentation(spec.image_size, **augmentation, augment_on_device=on_device)
        prepare: dict[str, Prepare] = {"train": train, "val": EvalPreprocessing(spec.image_size, **resize)}
        mean, std = tuple(prepared["mean"]), tuple(prepared["std"])
        finish = DeviceTransforms(mean, std, noise=self.re_mode == "pixel", blurs=train.blurs_on_device)
        border = [round(255 * value) for value in prepared["mean"]]
        decode_on_gpu = file_decoder(log) if decoder.name == "cuda" else None
        sources, num_classes, class_names = open_sources()
        mixing = spec.mixing(self.mixup, num_classes=num_classes)

        def loader(split: str, training: bool) -> DatasetLoader:
            prepared_by = prepare["train" if training else "val"]
            in_worker, cropper = _division_of_work(
                decoder, decode_on_gpu, prepared_by, border, split, on_gpu=spec.pin_memory, log=log
            )
            samples = ImageSamples(
                sources[split],
                prepared_by,
                in_worker,
                finish,
                seed=spec.seed,
                cropper=cropper,
                device_share=self.cuda_share,
            )
            mixed = mixing if training else None
            return spec.loader(samples, training=training, mixing=mixed, max_bad_share=self.max_bad_share, log=log)

        for source in sources.values():
            # If the processes together have more bad images than they may, one of them exceeds its limit.
            check_headers(
                source,
                spec.image_size,
                check_images=self.check_images,
                small_images=self.small_images,
                allowed=spec.shard.world * allowed_bad(self.max_bad_share, len(source.targets), spec.shard.world),
                log=log,
            )
        loaders = {split: loader(split, training=split == "train") for split in sources}
        dense = {split for split, source in sources.items() if source.targets.ndim == 2}
        return Data(
            loaders.get("train"),
            loaders["val"],
            num_classes,
            class_names=class_names,
            preprocessing=prepared_eval,
            targets="labels" if "val" in dense else "distributions" if dense else "classes",
            open_plain_train=(lambda: loader("train", training=False)) if "train" in sources else None,
        )


def _division_of_work(
    decoder: Decoder,
    decode_on_gpu: FileDecoder | None,
    prepare: Prepare,
    border: list[int],
    split: str,
    *,
    on_gpu: bool,
    log: logging.Logger,
) -> tuple[Decoder, DeviceCropper | None]:
    """Return the decoder of the workers for a split, and the DeviceCropper if the device decodes or resizes."""
    if prepare.needs_worker is None:
        if decode_on_gpu is not None:
            return decoder, DeviceCropper(border, decode_on_gpu)
        if _device_resizes(decoder, on_gpu):
            return Decoder(decoder.name, passes_on_pixels=True), DeviceCropper(border)
    elif on_gpu or decoder.name == "cuda":
        choice = f": decode={decoder.in_worker.name} for {split}" if decoder.name == "cuda" else ""
        log.info("%s%s", prepare.needs_worker, choice)
    return decoder.in_worker, None


def _device_resizes(decoder: Decoder, on_gpu: bool) -> bool:
    """Return whether the device resizes what workers decode. Without the Triton kernel, workers are faster."""
    return on_gpu and not decoder.is_reference and has_triton()


def _device_augments(on_gpu: bool) -> bool:
    """Return whether the device applies RandAugment, AutoAugment and 3-Augment: only kernels do."""
    return on_gpu and has_triton()


def _preprocessing(in_chans: int, given: dict[str, Any]) -> tuple[dict, dict]:
    """Return the preprocessing of training and of evaluation, with defaults for what is None. UsageError if invalid."""
    if in_chans != 3:
        raise UsageError(
            f"in_chans={in_chans}: images are decoded to RGB, so choose a model with in_chans=3, such as "
            "vit_base_patch16_224",
            code="data.in_chans",
            in_chans=in_chans,
        )
    own = {name: as_list(value) for name, value in given.items() if value is not None}
    prepared: dict[str, Any] = PREPROCESSING | own
    if not is_numbers(prepared["mean"], 3):
        raise value_error("mean", prepared["mean"], "a number each for red, green and blue, such as [0.5, 0.5, 0.5]")
    if not (is_numbers(prepared["std"], 3) and min(prepared["std"]) > 0):
        expected = "a number above 0 each for red, green and blue, such as [0.5, 0.5, 0.5]"
        raise value_error("std", prepared["std"], expected)
    return prepared, prepared | ({"interpolation": "bicubic"} if prepared["interpolation"] == "random" else {})
