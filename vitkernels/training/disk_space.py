"""Check that a run's disk has room for its checkpoints and weights, before training and after it."""

import logging
from pathlib import Path

import torch
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.files import free_bytes
from vitkernels.training.trainer import Trainer

log = logging.getLogger("vitkernels")


class LostCheckpointsError(RuntimeError):
    """Training completed and wrote the last weights, but the disk had no room for the best weights."""


def check_space(trainer: Trainer, folder: Path, saves: bool, evaluates: bool) -> None:
    """Raise UsageError if the weights and one checkpoint do not fit on the disk; warn if two checkpoints do not.

    Older checkpoints that make room for the next count as free space.

    Args:
        saves: whether the run writes checkpoints.
        evaluates: whether it keeps the weights of the best evaluation next to the last ones.
    """
    one_copy = sum(map(_bytes, (trainer.model, trainer.ema and trainer.ema.module)))
    checkpoint = one_copy + _optimizer_bytes(trainer.optimizer) if saves else 0
    has_best = (folder / "best.safetensors").exists()  # of an earlier attempt
    weights = 2 * one_copy if evaluates and not has_best else one_copy
    free = free_bytes(folder) + (trainer.checkpoints.reclaimable_bytes() if trainer.checkpoints else 0)
    if free < weights + checkpoint:
        which = "last and the best" if weights > one_copy else "trained"
        raise UsageError(
            f"the disk of {folder} has {_mb(free)} free, but the {which} weights take {_mb(weights)}"
            f"{f' and a checkpoint {_mb(checkpoint)}' if saves else ''}: free some space, or put the run elsewhere: "
            "hydra.run.dir=FOLDER",
            code="run.disk_full",
            free=free,
            needed=weights + checkpoint,
        )
    if free < weights + 2 * checkpoint:
        log.warning(
            "the disk of %s has %s free; the weights and two checkpoints take %s. Free some space, or checkpoints may "
            "be lost",
            *(folder, _mb(free), _mb(weights + 2 * checkpoint)),
        )


def report_unwritten(trainer: Trainer) -> None:
    """Log the checkpoints that could not be written; raise LostCheckpointsError if the best weights are among them."""
    unwritten = trainer.checkpoints.unwritten if trainer.checkpoints else []
    if not unwritten:
        return
    steps = ", ".join(map(str, unwritten[-8:]))
    log.warning("%d checkpoints could not be written (steps %s); free some disk space", len(unwritten), steps)
    if trainer.state.last_eval and not trainer.state.best["step"]:
        raise LostCheckpointsError(
            "training is complete and model.safetensors has the last weights, but no checkpoint could be written: the "
            "weights of the best evaluation are lost"
        )


def _bytes(model: nn.Module | None) -> int:
    """Return the size of the full tensors, also of sharded ones."""
    return 0 if model is None else sum(t.numel() * t.element_size() for t in model.state_dict().values())


def _optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Estimate the size of the optimizer's state, which does not exist before the first step.

    Adam keeps two averages of each parameter. Other optimizers with momentum are assumed to keep one.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    averages = 2 if isinstance(optimizer, torch.optim.Adam) else int(bool(optimizer.defaults.get("momentum")))
    return averages * sum(p.numel() * p.element_size() for p in parameters)


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
