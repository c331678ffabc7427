"""Arithmetic of a run: how many steps it has, which batches each step takes, and what is due after it.

Nothing here needs torch, a device or a data set.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Flag, auto
from typing import TYPE_CHECKING, Any

from vitkernels.errors import UsageError

if TYPE_CHECKING:
    from vitkernels.data.contract import Loader


class Due(Flag):
    """Actions due after a step. The empty value means: launch the next step without waiting for the device."""

    NONE = 0
    LOG = auto()
    EVAL = auto()
    SAVE = auto()
    STOP = auto()  # a signal requested a stop before the last step
    END = auto()  # the last step is done


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run, counted from 1; a step takes `accum_steps` batches on each process.

    total_steps: length of the run.
    steps_per_epoch: full steps in an epoch; batches that do not fill a step are dropped.
    accum_steps: batches whose gradients one optimizer step accumulates.
    images_per_step: images per step, summed over all processes.
    log_every, save_every_steps: in steps. eval_every, save_every_epochs: in epochs. None: never.
    """

    total_steps: int
    steps_per_epoch: int
    accum_steps: int = 1
    images_per_step: int = 1
    log_every: int | None = None
    eval_every: int | None = None
    save_every_epochs: int | None = None
    save_every_steps: int | None = None

    @classmethod
    def of(cls, trainer: Any, checkpoints: Any, *, batches_per_epoch: int, images_per_batch: int) -> "StepPlan":
        """Return the plan of a run from its `trainer` and `checkpoints` settings (vitkernels.config).

        images_per_batch: images per batch, summed over all processes.
        """
        accum = trainer.accum_steps
        steps_per_epoch = batches_per_epoch // accum
        if steps_per_epoch == 0:
            raise UsageError(
                f"trainer.accum_steps={accum} needs {accum} batches per step, but an epoch has only "
                f"{batches_per_epoch}; lower trainer.accum_steps or data.batch_size",
                code="plan.accum_steps",
                accum_steps=accum,
                batches_per_epoch=batches_per_epoch,
            )
        return cls(
            total_steps=trainer.max_steps or math.ceil(trainer.max_epochs * steps_per_epoch),
            steps_per_epoch=steps_per_epoch,
            accum_steps=accum,
            images_per_step=images_per_batch * accum,
            log_every=trainer.log_every,
            eval_every=trainer.eval_every,
            save_every_epochs=checkpoints.every_epochs,
            save_every_steps=checkpoints.every_steps,
        )

    def warmup_steps(self, epochs: float, cap: float | None) -> int:
        """Return the number of steps in `epochs` epochs, at most the fraction `cap` of the run (None: no limit)."""
        steps = round(epochs * self.steps_per_epoch)
        return steps if cap is None else min(steps, int(cap * self.total_steps))

    def epoch_of(self, step: int) -> int:
        """Return the epoch, counted from 0, that the step numbered `step` belongs to."""
        return (step - 1) // self.steps_per_epoch

    def steps_left_in_epoch(self, step: int) -> int:
        """Return how many steps the current epoch has left after `step` steps."""
        return self.steps_per_epoch - step % self.steps_per_epoch

    def batches(self, loader: "Loader", step: int) -> Iterator:
        """Return the batches that the current epoch has left after `step` steps."""
        epoch, index = divmod(step, self.steps_per_epoch)
        return loader.epoch(epoch, start=index * self.accum_steps)

    def due(self, step: int, stopping: bool = False) -> Due:
        """Return what is due after `step` steps, given whether a stop was requested."""
        ends = step >= self.total_steps
        due = Due.END if ends else Due.STOP if stopping else Due.NONE
        ends_epoch, epochs = step % self.steps_per_epoch == 0, self.epoch_of(step) + 1

        def epochs_due(every: int | None) -> bool:
            return every is not None and (ends or (ends_epoch and epochs % every == 0))

        if epochs_due(self.eval_every):
            due |= Due.EVAL
        saves = bool(self.save_every_epochs or self.save_every_steps)
        every_steps = self.save_every_steps is not None and step % self.save_every_steps == 0
        # The weights of each evaluation are saved: they may be the best.
        if Due.STOP in due or (Due.EVAL in due and saves) or epochs_due(self.save_every_epochs) or every_steps:
            due |= Due.SAVE
        if self.log_every and step % self.log_every == 0:
            due |= Due.LOG
        return due

    def sample_ids(self, loader: "Loader", step: int, ranks: range | list[int]) -> list[int]:
        """Return the data set indices of the samples that the step numbered `step` took on these ranks."""
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        batches = range(index * self.accum_steps, (index + 1) * self.accum_steps)
        return [i for rank in ranks for batch in batches for i in loader.sample_ids(epoch, batch, rank)]
