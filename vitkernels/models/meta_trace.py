"""Count parameters and FLOPs, and list attention calls, by running a model once on the meta device."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

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
        with native attention: a kernel that recomputes scores gets no credit for the extra work. They are those of
        timm's model, also if `set_ops` leaves out rows that the logits do not depend on.
    attention: the distinct attention problems of a training step. attention_calls: how often each occurs in a forward
        pass.
    """

    parameters: int
    train_flops_per_image: int
    attention: tuple[Problem, ...]
    attention_calls: tuple[int, ...]


class _ProblemRecorder(Native):
    """Native attention that counts the problems passed to it."""

    name = "recorder"

    def __init__(self):
        self.problems: Counter[Problem] = Counter()

    def refusal(self, problem: Problem) -> None:
        self.problems[problem] += 1


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
        UsageError: "models.image_size" if the model rejects images of that size, or would ignore pixels at the edge.
    """
    recorder = _ProblemRecorder()
    with torch.device("meta"):
        model = create(recorder)
        images = torch.empty(1, in_chans, image_size, image_size)
    _check_patches_cover(model, image_size)
    with FlopCounterMode(display=False) as counter:
        try:
            logits = model(images)
        except (AssertionError, RuntimeError) as error:  # timm asserts that sizes are compatible; torch, that they fit
            message = f"the model does not support images of {image_size} px: {error}"
            raise UsageError(message, code="models.image_size", image_size=image_size) from error
        logits.sum().backward()
    problems = tuple(
        replace(p, batch=p.batch * batch_size, dtype=dtype, device_type=device_type)  # windows are batch entries
        for p in recorder.problems
    )
    return ModelFacts(
        parameters=sum(p.numel() for p in model.parameters()),
        train_flops_per_image=counter.get_total_flops(),
        attention=problems,
        attention_calls=tuple(recorder.problems.values()),
    )


def _check_patches_cover(model: nn.Module, image_size: int) -> None:
    """Raise UsageError if the patches leave pixels over: timm's convolution would ignore them without a word.

    A few models of timm were published with such a size; at that size they are accepted.
    """
    embed: Any = getattr(model, "patch_embed", None)
    patch = max(getattr(embed, "patch_size", None) or (1,))
    published = (getattr(model, "pretrained_cfg", None) or {}).get("input_size", (0,))[-1]
    left_over = image_size % patch
    if left_over == 0 or image_size == published or getattr(embed, "dynamic_img_pad", False):
        return
    nearest = [size for size in (image_size - left_over, image_size - left_over + patch) if size]
    raise UsageError(
        f"images of {image_size} px do not divide into patches of {patch} px: {left_over} px at two edges would be "
        f"ignored. Use {' or '.join(map(str, nearest))} px",
        code="models.image_size",
        image_size=image_size,
        patch_size=patch,
        nearest=nearest,
    )
