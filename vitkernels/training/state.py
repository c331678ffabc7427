"""The progress of a run, which a checkpoint stores next to its tensors."""

from collections import deque
from dataclasses import dataclass, field

RECENT_STEPS = 20  # a run's final loss is the mean over these


@dataclass
class TrainState:
    """The progress of a run.

    step: optimizer steps taken.
    best: top-1 accuracy in percent, loss, step and epoch of the best evaluation; step 0 before the first one.
    last_eval: the figures of the last evaluation, {} before the first one.
    recent_losses: losses of the last RECENT_STEPS steps that were read from the device.
    eval_pending: whether the evaluation due after `step` has yet to run.
    """

    step: int = 0
    best: dict = field(default_factory=lambda: {"top1": -1.0, "step": 0})
    last_eval: dict = field(default_factory=dict)
    recent_losses: deque = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    eval_pending: bool = False

    def state_dict(self) -> dict:
        """Return the entries of a checkpoint's state.json, except the step, which the checkpoint adds."""
        return {
            "best": self.best,
            "result": self.last_eval,
            "recent_losses": list(self.recent_losses),
            "eval_pending": self.eval_pending,
        }

    def load_state_dict(self, state: dict) -> None:
        """Restore what `state_dict` returned, and the step."""
        self.step, self.best, self.last_eval = state["step"], state["best"], state["result"]
        self.recent_losses.clear()
        self.recent_losses.extend(state.get("recent_losses", []))  # older checkpoints lack them
        self.eval_pending = state["eval_pending"]

    @property
    def mean_recent_loss(self) -> float | None:
        """Mean training loss over the last steps, None before the first."""
        return sum(self.recent_losses) / len(self.recent_losses) if self.recent_losses else None
