"""Knowledge distillation: a student that learns from the predictions of a frozen teacher on the same images.

Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021,
arXiv:2012.12877, equations 2 and 3; Hinton et al. 2015 for the soft kind. Shapes: B batch size, K classes.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.config.groups import DistillSettings
from vitkernels.data import IGNORE, Data
from vitkernels.errors import UsageError
from vitkernels.inference import open_trained
from vitkernels.models.any_model import any_timm_model, normalization
from vitkernels.training.loss import Loss

log = logging.getLogger("vitkernels")


class Teacher(nn.Module):
    """A frozen classifier of the student's images.

    If the normalizations of teacher and student are known and differ, the images are renormalized for the teacher.
    """

    factor: Tensor
    offset: Tensor

    def __init__(self, model: nn.Module, student: tuple | None = None, own: tuple | None = None):
        super().__init__()
        self.model = model.requires_grad_(False)
        self.eval()
        factor, offset = torch.ones(1), torch.zeros(1)
        if student is not None and own is not None and student != own:
            (mean, std), (own_mean, own_std) = (torch.tensor(one).view(2, -1, 1, 1) for one in (student, own))
            factor, offset = std / own_std, (mean - own_mean) / own_std
        self.register_buffer("factor", factor, persistent=False)
        self.register_buffer("offset", offset, persistent=False)

    def train(self, mode: bool = True) -> "Teacher":
        """Stay in evaluation mode."""
        return super().train(False)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Return the logits (B, K) of images (B, C, S, S) that are normalized for the student."""
        return self.model(images * self.factor + self.offset)


def build_teacher(settings: DistillSettings, data: Data, image_size: int, in_chans: int) -> Teacher:
    """Build the teacher that the settings select, on the CPU.

    Raises:
        UsageError: "distill.classes" if its classes are not the data set's, "distill.images" if it does not accept the
            student's images, and the errors of `open_trained` and `any_timm_model`.
    """
    name, names, own = settings.teacher, None, None
    assert name is not None
    if Path(name).exists():
        trained = open_trained(name)
        model, names = trained.build(), trained.config["pretrained_cfg"].get("label_names")
        config = trained.config["pretrained_cfg"]
        own = (list(config["mean"]), list(config["std"]))
    else:
        weights = settings.checkpoint
        model = any_timm_model(name, weights=weights, num_classes=data.num_classes, in_chans=in_chans)
        own = normalization(model)
    _check(model, settings, data, names, torch.zeros(1, in_chans, image_size, image_size))
    known = data.preprocessing
    student = None if known is None else (list(known["mean"]), list(known["std"]))
    count = sum(parameter.numel() for parameter in model.parameters())
    log.info("teacher: %s, %.1f M parameters, %s labels, weight %g", name, count / 1e6, settings.kind, settings.weight)
    return Teacher(model, student, own)


@torch.no_grad()
def _check(model: nn.Module, settings: DistillSettings, data: Data, names: list[str] | None, images: Tensor) -> None:
    """Raise UsageError unless the model accepts such images and has the data set's classes."""
    try:
        outputs = model.eval()(images).shape[-1]
    except (AssertionError, RuntimeError) as error:  # timm asserts sizes; torch refuses shapes that do not fit
        size, reason = images.shape[-1], str(error).splitlines()[0].rstrip(".")
        raise UsageError(
            f"teacher {settings.teacher} does not accept {images.shape[1]}-channel images of {size} px: {reason}. "
            "Use a teacher for the student's image size, or train the student at the teacher's",
            code="distill.images",
            teacher=settings.teacher,
            image_size=size,
        ) from error
    if outputs != data.num_classes or (names and data.class_names and names != data.class_names):
        has = "was trained on other classes than the data set's"
        if outputs != data.num_classes:
            has = f"has {outputs} classes, but the data set has {data.num_classes}"
        raise UsageError(
            f"teacher {settings.teacher} {has}. Train a teacher on this data set first, and use its run",
            code="distill.classes",
            teacher=settings.teacher,
            outputs=outputs,
            num_classes=data.num_classes,
        )


@dataclass(frozen=True)
class Distillation:
    """The objective with a teacher: (1 - weight) · loss of the targets + weight · loss of the teacher's predictions.

    teacher: called with the student's images.
    loss_fn: the loss of the targets.
    kind: "hard" is the cross-entropy with the teacher's most likely class; "soft" is the Kullback-Leibler divergence
        from the teacher's distribution, both at `temperature`, times its square.

    A student with a distillation token learns the teacher's predictions with its second head; any other student uses
    its only head.
    """

    teacher: Callable[[Tensor], Tensor]
    loss_fn: Loss
    kind: str = "hard"
    weight: float = 0.5
    temperature: float = 3.0

    def __call__(self, outputs: Any, targets: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the objective of a batch; rows without a sample contribute nothing.

        outputs: the student's logits (B, K), or the pair of both heads. targets: as `Loss` takes them. teacher_logits:
            (B, K).
        """
        first, second = outputs if isinstance(outputs, tuple) else (outputs, outputs)
        own = self.loss_fn(first.float(), targets)
        return (1 - self.weight) * own + self.weight * self.of_teacher(second.float(), targets, teacher_logits.float())

    def of_teacher(self, logits: Tensor, targets: Tensor, teacher_logits: Tensor) -> Tensor:
        """Return the mean loss of the teacher's predictions over the rows with a sample; 0 if there are none."""
        present = (targets.sum(1) > 0 if targets.is_floating_point() else targets != IGNORE).float()
        if self.kind == "hard":
            losses = F.cross_entropy(logits, teacher_logits.argmax(1), reduction="none")
        else:
            scaled, goal = (F.log_softmax(x / self.temperature, dim=1) for x in (logits, teacher_logits))
            losses = F.kl_div(scaled, goal, reduction="none", log_target=True).sum(1) * self.temperature**2
        # As the loss of the targets is: over present rows for class numbers, over all rows for distributions.
        count = present.new_tensor(len(present)) if targets.is_floating_point() else present.sum().clamp(min=1)
        return (losses * present).sum() / count
