"""Run a trained model on image files: the k most likely classes of each, or its pooled features.

Shapes: B rows, K classes, D features.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vitkernels import runtime as runtimes
from vitkernels.inference.images import ImageBatch, read_batches
from vitkernels.inference.trained_model import TrainedModel
from vitkernels.runtime import Runtime

log = logging.getLogger("vitkernels")


@dataclass(frozen=True)
class Prediction:
    """One image file's most likely classes with their probabilities, most likely first."""

    file: str
    classes: list[tuple[str, float]]


@dataclass
class ModelOnFiles:
    """A trained model on a device, applied to image files in batches.

    Args:
        trained: the weights and their preprocessing.
        batch_size: images per forward pass.
        runtime: the device; None takes a GPU or TPU if there is one.
        unreadable: filled with the files that could not be read, and the reasons.
    """

    trained: TrainedModel
    batch_size: int = 64
    runtime: Runtime | None = None
    unreadable: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._runtime = self.runtime or runtimes.create("auto", "auto")
        self._model = self.trained.build().to(self._runtime.device)

    def predict(self, files: Iterable[str], top: int = 5) -> Iterator[Prediction]:
        """Yield the `top` most likely classes of each readable file, in order."""
        names = self.trained.class_names

        def most_likely(images: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(self._model(images).float().softmax(-1).topk(min(top, len(names))))

        for batch, (confidences, classes) in self._outputs(files, most_likely):
            for file, row, numbers in zip(batch.files, confidences.tolist(), classes.tolist(), strict=True):
                yield Prediction(file, [(names[number], share) for number, share in zip(numbers, row, strict=True)])

    def embed(self, files: Iterable[str]) -> Iterator[tuple[list[str], torch.Tensor]]:
        """Yield files and their pooled features, float32 (B, D): the input of the classifier head."""
        for batch, (features,) in self._outputs(files, lambda images: (pooled_features(self._model, images).float(),)):
            yield batch.files, features

    @torch.no_grad()
    def _outputs(
        self, files: Iterable[str], outputs: Callable[[torch.Tensor], tuple[torch.Tensor, ...]]
    ) -> Iterator[tuple[ImageBatch, tuple[torch.Tensor, ...]]]:
        channels = self.trained.input_size[0]
        for batch in read_batches(files, self.trained.transform(), channels, self.batch_size):
            for file, reason in batch.unreadable.items():
                log.warning("could not read %s (%s)", file, reason)
            self.unreadable |= batch.unreadable
            if batch.files:
                with self._runtime.autocast():
                    found = outputs(batch.images.to(self._runtime.device))
                yield batch, tuple(tensor.cpu() for tensor in found)


def pooled_features(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    """Return the features (B, D) that a timm model's classifier head would receive."""
    timm_model: Any = model
    return timm_model.forward_head(timm_model.forward_features(images), pre_logits=True)
