"""Build any classifier of timm, convolutional ones included, for use as a teacher."""

import difflib
from pathlib import Path

import timm
from timm.models.deit import VisionTransformerDistilled
from torch import nn

from vitkernels.errors import unknown_name
from vitkernels.models.create import timm_model
from vitkernels.models.presets import PRESETS
from vitkernels.models.weights import load_weights, read_state_dict


def any_timm_model(name: str, *, weights: str | Path | None, num_classes: int, in_chans: int) -> nn.Module:
    """Return a timm model in evaluation mode, on the CPU.

    Args:
        name: any model of timm, with or without the tag of its pretrained weights, or a preset of this package.
        weights: a file that `read_state_dict` reads; None downloads timm's weights, which determine the classes.
        num_classes, in_chans: classes of the weights, and channels of the images.

    Raises:
        UsageError: "unknown_name" (kind "teacher"), "models.tag", "models.download", "models.arguments", and those of
            `read_state_dict` and `load_weights`.
    """
    if name not in PRESETS and not timm.is_model(name):
        raise unknown_name("teacher", name, difflib.get_close_matches(name, timm.list_models(), n=8, cutoff=0.4))
    if weights is None:
        return timm_model(name, in_chans=in_chans, pretrained=True).eval()
    model = timm_model(name, in_chans=in_chans, num_classes=num_classes)
    load_weights(model, read_state_dict(weights), str(weights))
    return model.eval()


def normalization(model: nn.Module) -> tuple[list[float], list[float]] | None:
    """Return mean and standard deviation of the images that a timm model was trained on, None if unknown."""
    known = getattr(model, "pretrained_cfg", None) or {}
    mean, std = known.get("mean"), known.get("std")
    return None if mean is None or std is None else (list(mean), list(std))


def answer_with_both_heads(model: nn.Module) -> None:
    """Let a model with DeiT's distillation token return the logits of both heads in training; no effect on others."""
    if isinstance(model, VisionTransformerDistilled):
        model.set_distilled_training(True)
