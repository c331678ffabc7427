"""Choose the training objective for the settings and the kind of targets: the loss, and a teacher if there is one."""

from vitkernels import models
from vitkernels.config import Config
from vitkernels.data import Data
from vitkernels.errors import UsageError
from vitkernels.runtime import Runtime
from vitkernels.training.distillation import Distillation, build_teacher
from vitkernels.training.loss import Loss, build_bce, build_loss


def loss_of(cfg: Config, data: Data) -> Loss:
    """Return the loss for the settings and the kind of targets. UsageError if they contradict each other."""
    t = cfg.trainer
    kind = ("bce" if data.targets == "labels" else "cross_entropy") if t.loss == "auto" else t.loss
    if kind == "cross_entropy" and data.targets == "labels":
        raise UsageError(
            "trainer.loss=cross_entropy expects one class per image, but the data has several labels: use "
            "trainer.loss=bce",
            code="config.conflict",
            setting="trainer.loss",
            value=t.loss,
        )
    if kind == "cross_entropy" and t.bce_threshold is not None:
        raise UsageError(
            f"trainer.bce_threshold={t.bce_threshold} belongs to trainer.loss=bce: set both, or neither",
            code="config.conflict",
            setting="trainer.bce_threshold",
            value=t.bce_threshold,
        )
    if data.targets == "labels" and cfg.distill.teacher is not None:
        raise UsageError(
            "distill.teacher expects one class per image, but the data has several labels: set distill.teacher=null",
            code="config.conflict",
            setting="distill.teacher",
            value=cfg.distill.teacher,
        )
    if kind == "bce":
        return build_bce(t.label_smoothing, t.bce_threshold, data.targets)
    return build_loss(cfg.ops.cross_entropy, t.label_smoothing, data.targets)


def distillation_of(cfg: Config, data: Data, loss_fn: Loss, runtime: Runtime, compiled: bool) -> Distillation | None:
    """Return the objective with the teacher that the settings select, on the device; None without a teacher."""
    if cfg.distill.teacher is None:
        return None
    teacher = build_teacher(
        cfg.distill, data, *models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)
    )
    teacher = teacher.to(runtime.device)
    # Without CUDA graphs: the student's graph would reuse the memory of the teacher's predictions.
    called = runtime.compile(teacher, None) if compiled else teacher
    return Distillation(called, loss_fn, cfg.distill.kind, cfg.distill.weight, cfg.distill.temperature)
