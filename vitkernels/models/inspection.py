"""What a model asks for, found by running it once without data (on the meta device)."""

from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from vitkernels.attention import Problem
from vitkernels.attention.native import Native
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model at one input size and batch.

    parameters: number of parameters.
    train_flops_per_image: floating-point operations of the products in forward and backward, each multiply-add as
        two. Counted on the plain attention, so that a kernel that recomputes scores gets no credit for it.
    attention: the distinct attention calls that a training step makes.
    """

    parameters: int
    train_flops_per_image: int
    attention: tuple[Problem, ...]


class _Recorder(Native):
    """Native attention that notes the problems it is given."""

    name = "recorder"

    def __init__(self):
        self.problems = {}

    def refusal(self, problem: Problem) -> None:
        self.problems[problem] = None


def inspect_model(
    create, *, image_size: int, in_chans: int, batch_size: int, dtype: torch.dtype, device_type: str
) -> ModelFacts:
    """Facts of the model that `create(attention_backend)` builds, trained on (batch, in_chans, size, size) images.

    dtype and device_type are what attention will be computed in and on: they go into the reported problems.
    """
    recorder = _Recorder()
    with torch.device("meta"):
        model: nn.Module = create(recorder)
        images = torch.empty(1, in_chans, image_size, image_size)
    with FlopCounterMode(display=False) as counter:
        try:
            logits = model(images)
        except AssertionError as error:  # timm's way to refuse sizes that do not fit together
            raise UsageError(f"the model cannot take images of {image_size} px: {error}") from error
        logits.sum().backward()
    problems = tuple(replace(p, batch=batch_size, dtype=dtype, device_type=device_type) for p in recorder.problems)
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        train_flops_per_image=counter.get_total_flops(),
        attention=problems,
    )
