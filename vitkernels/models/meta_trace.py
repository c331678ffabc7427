"""Count parameters and FLOPs, and list attention calls, by running a model once on the meta device."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitkernels.attention import AttentionBackend, Problem
from vitkernels.attention.native import Native
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class ModelFacts:
    """Properties of a model at one image size and batch size.

    parameters: number of parameters.
    train_flops_per_image: FLOPs of the matrix products in forward and backward, two per multiply-add. They are counted
        with native attention: a kernel that recomputes scores gets no credit for the extra work.
    attention: the distinct attention problems of a training step.
    """

    parameters: int
    train_flops_per_image: int
    attention: tuple[Problem, ...]


class _ProblemRecorder(Native):
    """Native attention that records the problems passed to it."""

    name = "recorder"

    def __init__(self):
        self.problems = {}

    def refusal(self, problem: Problem) -> None:
        self.problems[problem] = None


def inspect_model(
    create: Callable[[AttentionBackend], nn.Module],
    *,
    image_size: int,
    in_chans: int,
    batch_size: int,
    dtype: torch.dtype,
    device_type: str,
) -> ModelFacts:
    """Return the facts of a model trained on images (batch_size, in_chans, image_size, image_size).

    Args:
        create: called with an attention backend, returns the model.
        dtype, device_type: of the reported attention problems; the trace itself runs on the meta device.

    Raises:
        UsageError: "models.image_size" if the model rejects images of that size.
    """
    recorder = _ProblemRecorder()
    with torch.device("meta"):
        model = create(recorder)
        images = torch.empty(1, in_chans, image_size, image_size)
    with FlopCounterMode(display=False) as counter:
        try:
            logits = model(images)
        except AssertionError as error:  # timm asserts that sizes are compatible
            message = f"the model does not support images of {image_size} px: {error}"
            raise UsageError(message, code="models.image_size", image_size=image_size) from error
        logits.sum().backward()
    problems = tuple(replace(p, batch=batch_size, dtype=dtype, device_type=device_type) for p in recorder.problems)
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        train_flops_per_image=counter.get_total_flops(),
        attention=problems,
    )
