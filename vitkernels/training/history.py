"""Per-step figures that stay on the device until a log boundary, and the watch for values that are not finite."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

from torch import Tensor

from vitkernels.runtime import Runtime


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""


@dataclass
class StepRecord:
    """One optimizer step: its number (from 1), mean loss over its batch, gradient norm before clipping, and lr."""

    step: int
    loss: float
    grad_norm: float
    lr: float

    def as_dict(self) -> dict:
        return asdict(self)


class History:
    """Collects device tensors step by step; reads them all at once."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        self._pending.append((step, loss.detach(), grad_norm.detach(), lr))

    def read(self) -> list[StepRecord]:
        """The records since the last call, in order. Waits for the device."""
        losses = self.runtime.read([loss for _, loss, _, _ in self._pending])
        norms = self.runtime.read([norm for _, _, norm, _ in self._pending])
        records = [
            StepRecord(step, loss, norm, lr)
            for (step, _, _, lr), loss, norm in zip(self._pending, losses, norms, strict=True)
        ]
        self._pending.clear()
        return records


def check_finite(
    records: list[StepRecord], samples_of_step: Callable[[int], str], last_good: str, gradients: bool = True
) -> None:
    """Raise NonFiniteLossError at the first record that is not finite, with all that helps to find the cause.

    gradients: whether gradient norms must be finite too. Not under loss scaling, which tries scales until they are.
    """
    for record in records:
        if not math.isfinite(record.loss) or (gradients and not math.isfinite(record.grad_norm)):
            raise NonFiniteLossError(
                f"loss is {record.loss:.6g}, gradient norm {record.grad_norm:.4g} at step {record.step}: "
                f"lr {record.lr:.3e}, samples {samples_of_step(record.step)}. {last_good} "
                "Lower optim.lr, lengthen schedule.warmup_epochs, or set trainer.clip_grad."
            )
