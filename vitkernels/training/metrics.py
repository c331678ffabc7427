"""Per-step losses and gradient norms, kept on the device until a log boundary."""

import math
from dataclasses import dataclass

from torch import Tensor

from vitkernels.parallel import Parallel


@dataclass
class StepRecord:
    """The figures of one optimizer step.

    step: counted from 1. loss: mean over the images of all processes. grad_norm: before clipping. lr: learning rate.
    nonfinite_ranks: with several processes, the ranks whose own loss is not finite. step_ms: the step's time, None for
    steps that are not timed.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    nonfinite_ranks: tuple[int, ...] = ()
    step_ms: float | None = None

    def curves(self) -> dict[str, float]:
        """Return the step's points under names whose order is that of importance."""
        points = {"1_loss": self.loss, "3_lr": self.lr}
        return points if self.step_ms is None else points | {"4_step_ms": self.step_ms}

    def as_dict(self) -> dict:
        return {"step": self.step, "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}


def add_times(records: list[StepRecord], step_ms: list[float]) -> None:
    """Give the last records their step times, in ms; the first steps of a process are not timed."""
    for record, ms in zip(reversed(records), reversed(step_ms), strict=False):
        record.step_ms = ms


class StepMetrics:
    """Collect scalar device tensors step by step, and read them all in one transfer."""

    def __init__(self, parallel: Parallel):
        self.parallel = parallel
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        """Add a step's figures without waiting for the device."""
        self._pending.append((step, loss.detach(), grad_norm.detach(), lr))

    def read(self) -> list[StepRecord]:
        """Return the records since the last call, in order. Waits for the device; all processes must call it."""
        read = self.parallel.runtime.read
        norms = read([norm for _, _, norm, _ in self._pending])
        by_rank = self.parallel.shares(read([loss for _, loss, _, _ in self._pending]))
        records = [
            StepRecord(step, sum(losses) / len(losses), norm, lr, _nonfinite(losses) if len(losses) > 1 else ())
            for (step, _, _, lr), norm, *losses in zip(self._pending, norms, *by_rank, strict=True)
        ]
        self._pending.clear()
        return records


def _nonfinite(losses: list[float]) -> tuple[int, ...]:
    return tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss))
