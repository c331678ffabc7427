"""The arguments that every data set receives, as one object, and a decorator for functions that take it."""

import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from vitkernels.data.checks import check_common
from vitkernels.data.contract import UNSHARDED, Data, Shard
from vitkernels.data.loader import DatasetLoader
from vitkernels.data.mixing import Mixing, build_mixing
from vitkernels.data.samples import Samples
from vitkernels.data.workers import worker_count


@dataclass(frozen=True)
class InputSpec:
    """The input that training requests from every data set.

    image_size, in_chans: side in pixels and channels of the images that the model takes.
    seed: for shuffling, augmentation and mixing.
    batch_size: rows per process.
    num_workers: processes that make batches ahead; 0 makes them in the calling process, "auto" starts one per CPU core,
        shared among the processes that train on this host.
    pin_memory: put batches in page-locked memory, for asynchronous copies to an NVIDIA GPU.
    train: False leaves out the training set, for evaluation.
    shard: this process's part of every batch.
    Raises UsageError for values that are invalid for every data set.
    """

    image_size: int
    in_chans: int
    seed: int
    batch_size: int
    num_workers: int | str = 0
    pin_memory: bool = False
    train: bool = True
    shard: Shard = UNSHARDED

    def __post_init__(self) -> None:
        check_common(self.batch_size, self.seed, self.pin_memory, worker_count(self.num_workers))

    def loader(
        self,
        samples: Samples,
        *,
        training: bool,
        mixing: Mixing | None = None,
        max_bad_share: float = 0.01,
        log: logging.Logger | None = None,
    ) -> DatasetLoader:
        """Return the loader of one split."""
        return DatasetLoader(
            samples,
            batch_size=self.batch_size,
            seed=self.seed,
            training=training,
            num_workers=worker_count(self.num_workers),
            pin_memory=self.pin_memory,
            mixing=mixing,
            shard=self.shard,
            max_bad_share=max_bad_share,
            log=log,
        )

    def mixing(self, settings: Mapping[str, Any] | None, num_classes: int) -> Mixing | None:
        """Return the Mixing with these settings; None for None."""
        return build_mixing(settings, num_classes=num_classes, seed=self.seed, batch_size=self.batch_size)


def data_set(build: Callable[..., Data]) -> Callable[..., Data]:
    """Turn `build(spec, *, ...)` into the function of keyword arguments that `_target_` names.

    The result takes InputSpec's fields next to the data set's own settings, and its signature lists both, so that a
    configuration can be checked against it. Further positional arguments of `build` are dataclasses of settings, whose
    fields are arguments, too.
    """
    _, *own = inspect.signature(build).parameters.values()
    groups = [InputSpec, *(parameter.annotation for parameter in own if parameter.kind is not parameter.KEYWORD_ONLY)]
    grouped = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=field.type,
        )
        for group in groups
        for field in fields(group)
    ]
    separate = [parameter for parameter in own if parameter.kind is parameter.KEYWORD_ONLY]
    signature = inspect.Signature([*grouped, *separate], return_annotation=Data)

    @functools.wraps(build)
    def build_from_arguments(**arguments: Any) -> Data:
        signature.bind(**arguments)  # TypeError for a missing or unknown one
        built = []
        for group in groups:
            names = [field.name for field in fields(group) if field.name in arguments]
            built.append(group(**{name: arguments.pop(name) for name in names}))
        return build(*built, **arguments)

    build_from_arguments.__signature__ = signature  # type: ignore[attr-defined]  # inspect reads it
    return build_from_arguments
