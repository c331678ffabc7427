"""A process that trains one variant of a sweep in turns: vitkernels.sweep.rounds starts one per variant.

    python timed_process.py FD < requests

It reads lines from stdin. The first is {"settings": ...}, all settings of the variant's run; each later one is the
number of steps of a turn. It answers each with a line of JSON on the file descriptor FD. Between turns it waits for
stdin, uses no CPU, and on a GPU keeps only weights and optimizer state. It ends when stdin does.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from vitkernels import parallel as strategies
from vitkernels import runtime as runtimes
from vitkernels.config import Config
from vitkernels.runtime import nvml
from vitkernels.training.setup import trainer_from_config
from vitkernels.training.trainer import Trainer

# First steps of a turn that are not timed: the caches hold another variant's data, and memory is allocated again.
UNTIMED_STEPS = 2
_SETTLING_STEPS = 6  # after trainer.warmup_steps; their median decides how many steps a turn has


class Turns:
    """Training steps of one variant, a few at a time, epoch after epoch."""

    def __init__(self, trainer: Trainer):
        self.trainer, self.runtime = trainer, trainer.parallel.runtime
        self._left = 0
        self._batches: Iterator[tuple[Tensor, Tensor]] = iter(())
        self._gpu = None
        if self.runtime.name == "cuda":
            self._gpu = str(torch.cuda.get_device_properties(self.runtime.device).uuid)
        trainer.net.train()

    def take(self, steps: int) -> dict[str, Any]:
        """Train `UNTIMED_STEPS` steps and time `steps` more; return the median and what the process and its GPU did.

        Keys: step_ms, the median; n, the steps behind it; input_wait_ms, the mean; cpu_share, CPU seconds of this
        process per second; gpu, as vitkernels.runtime.nvml.sample gives it at the end of the turn.
        """
        timer = self.trainer.timer
        wall, cpu = time.perf_counter(), time.process_time()
        timer.start()
        for _ in range(UNTIMED_STEPS + steps):
            self._step()
        gpu = None if self._gpu is None else nvml.sample(self._gpu)  # the device still works on the last steps
        window = timer.stop()
        cpu_share = (time.process_time() - cpu) / (time.perf_counter() - wall)
        self.trainer.metrics.read()
        if self._gpu is not None:
            torch.cuda.empty_cache()
        timed = window.step_ms[-steps:]
        return {
            "step_ms": round(statistics.median(timed), 4),
            "n": len(timed),
            "input_wait_ms": round(statistics.fmean(window.input_wait_ms[-steps:]), 4),
            "cpu_share": round(cpu_share, 2),
            "gpu": gpu,
        }

    def _step(self) -> None:
        trainer = self.trainer
        if self._left == 0:
            assert trainer.data.train is not None
            step = trainer.state.step
            self._batches = trainer.parallel.feed(trainer.plan.batches(trainer.data.train, step))
            self._left = trainer.plan.steps_left_in_epoch(step)
        trainer.train_step(self._batches)
        self._left -= 1


def main() -> None:
    """Build the variant, warm it up, report, and take turns until stdin ends."""
    answers = os.fdopen(int(sys.argv[1]), "w", buffering=1)
    sys.path.append(os.getcwd())  # for a data set or an optimizer in the user's own module, as in train.py
    cfg = Config.from_dict(json.loads(sys.stdin.readline())["settings"])
    runtime = runtimes.create(cfg.runtime.name, cfg.runtime.precision)
    with strategies.create(runtime=runtime, accum_steps=cfg.trainer.accum_steps, **vars(cfg.parallel)) as parallel:
        trainer, _ = trainer_from_config(cfg, parallel)
        trainer.timer.warmup_left = 0
        turns = Turns(trainer)
        turns.take(max(1, cfg.trainer.warmup_steps))
        first = turns.take(_SETTLING_STEPS)
        print(json.dumps({"device": runtime.device_name, "step_ms": first["step_ms"]}), file=answers)
        for line in sys.stdin:
            print(json.dumps(turns.take(int(line))), file=answers)


if __name__ == "__main__":
    main()
