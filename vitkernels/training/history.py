"""Per-step figures that stay on the device until a log boundary, and the watch for values that are not finite."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn

from vitkernels.parallel import Parallel

log = logging.getLogger(__name__)


class NonFiniteLossError(RuntimeError):
    """The loss or the gradient became NaN or infinite."""

    on_every_rank = True  # figures are compared by all processes together


@dataclass
class StepRecord:
    """One optimizer step: its number (from 1), mean loss over its batch, gradient norm before clipping, and lr.

    broken_ranks: those of several processes whose own loss is not finite.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    broken_ranks: tuple[int, ...] = ()

    def as_dict(self) -> dict:
        return {"step": self.step, "loss": self.loss, "grad_norm": self.grad_norm, "lr": self.lr}


class History:
    """Collects device tensors step by step; reads them all at once, and takes the mean loss of all images."""

    def __init__(self, parallel: Parallel):
        self.parallel = parallel
        self._pending: list[tuple[int, Tensor, Tensor, float]] = []

    def add(self, step: int, loss: Tensor, grad_norm: Tensor, lr: float) -> None:
        self._pending.append((step, loss.detach(), grad_norm.detach(), lr))

    def read(self) -> list[StepRecord]:
        """The records since the last call, in order. Waits for the device."""
        read = self.parallel.runtime.read
        norms = read([norm for _, _, norm, _ in self._pending])
        by_rank = self.parallel.shares(read([loss for _, loss, _, _ in self._pending]))
        records = [
            StepRecord(step, sum(losses) / len(losses), norm, lr, _broken(losses) if len(losses) > 1 else ())
            for (step, _, _, lr), norm, *losses in zip(self._pending, norms, *by_rank, strict=True)
        ]
        self._pending.clear()
        return records


def _broken(losses: list[float]) -> tuple[int, ...]:
    return tuple(rank for rank, loss in enumerate(losses) if not math.isfinite(loss))


def parameters_without_gradient(model: nn.Module) -> list[str]:
    """Names of those that are to be trained, and to which backward brought no gradient; warns of them."""
    names = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if names:
        log.warning(
            "backward brings no gradient to %s%s: they are not trained. Either the loss does not depend on them, or an "
            "attention backend or op has no backward pass",
            *(", ".join(names[:4]), f" and {len(names) - 4} more" if names[4:] else ""),
        )
    return names


def check_finite(
    records: list[StepRecord],
    samples_of_step: Callable[[int, int], str],
    last_good: Callable[[], str],
    gradients: bool = True,
) -> None:
    """Raise NonFiniteLossError at the first record that is not finite, with all that helps to find the cause.

    samples_of_step: takes the step's number and the rank. last_good: says which checkpoint there is.
    gradients: whether gradient norms must be finite too. Not under loss scaling, which tries scales until they are.
    """
    for record in records:
        if not math.isfinite(record.loss) or (gradients and not math.isfinite(record.grad_norm)):
            ranks = record.broken_ranks
            where = f" on rank {', '.join(map(str, ranks))}" if ranks else ""
            samples = samples_of_step(record.step, ranks[0] if ranks else 0)
            raise NonFiniteLossError(
                f"loss is {record.loss:.6g}{where}, gradient norm {record.grad_norm:.4g} at step {record.step}: "
                f"lr {record.lr:.3e}, samples {samples}. {last_good()} "
                "Lower optim.lr, lengthen schedule.warmup_epochs, or set trainer.clip_grad."
            )
