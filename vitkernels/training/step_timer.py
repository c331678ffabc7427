"""Step times as the device saw them, with all that is not training left out."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from vitkernels.runtime import Runtime

_NO_WAIT_MS = 1.0  # for input: after more of it an idle device says nothing of how fast the host launches


@dataclass
class Window:
    """The steps between two moments at which the device was synchronized."""

    step_ms: list[float] = field(default_factory=list)
    input_wait_ms: list[float] = field(default_factory=list)
    forward_done_ms: list[float] = field(default_factory=list)  # from a step's begin: all that waits for no other rank
    host_was_late: list[bool] = field(default_factory=list)  # of the steps that can tell, see StepTimer.forward_done


class StepTimer:
    """Times every training step after the first `warmup_steps` of this process, without waiting for the device.

    A step lasts from the end of the step before it to its own end, so gaps in which the device waits for the host
    or for input count. Where only windows can be seen (XLA), each step of a window gets the window's mean.
    Between `stop` and `start` nothing counts: evaluation, checkpoints and logging stay outside.

    steps_wait: whether each step ends when the device has done it, which tells nothing of how fast the host launches.

    Usage: start(); per step: `with waiting(): batch = next(...)`, forward, forward_done(), ..., step_done(); at log
    boundaries stop(), start().
    """

    def __init__(self, runtime: Runtime, warmup_steps: int, steps_wait: bool = False):
        self.runtime = runtime
        self.steps_wait = steps_wait
        self.warmup_left = warmup_steps
        self.step_ms: list[float] = []
        self.input_wait_ms: list[float] = []
        self.host_was_late: list[bool] = []
        self._stamps: list = []
        self._forwards: list = []
        self._late: list[bool] = []
        self._waits: list[float] = []
        self._wait = 0.0

    def start(self) -> None:
        """Begin a window. The device must be idle: at the beginning, or after `stop`."""
        self._stamps = [self.runtime.stamp()]
        self._forwards = []
        self._late = []
        self._waits = []
        self._wait = 0.0
        self._forward = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Around the host's wait for its next batch."""
        begin = time.perf_counter()
        yield
        self._wait += (time.perf_counter() - begin) * 1e3

    def forward_done(self) -> None:
        """After a forward pass; of several in a step the last counts.

        Once it is launched, a device that has done the whole step before had nothing to do while the host launched it.
        (The first step of a window cannot tell: the device was waited for.)
        """
        if not self.runtime.per_step_clock:
            return
        first_in_step, first_in_window = self._forward is None, len(self._stamps) == 1
        if first_in_step and not first_in_window and not self.steps_wait and self._wait < _NO_WAIT_MS:
            late = self.runtime.has_reached(self._stamps[-1])
            self._late += [] if late is None else [late]
        self._forward = self.runtime.stamp()

    def step_done(self) -> None:
        self._waits.append(self._wait)
        if self._forward is not None:
            self._forwards.append(self._forward)
        self._wait, self._forward = 0.0, None
        self._stamps.append(self.runtime.stamp())
        if self.warmup_left > 0:
            self.warmup_left -= 1
            if self.warmup_left == 0 and not self.runtime.per_step_clock:
                self.runtime.synchronize()  # so that no warm-up work is left in the first timed window
            self.start()

    def stop(self) -> Window:
        """Wait for the device and return the window's steps; they also go into the run's totals."""
        self.runtime.synchronize()
        stamps = self._stamps
        if not self.runtime.per_step_clock and len(stamps) > 1:
            mean = self.runtime.elapsed_ms(stamps[0], self.runtime.stamp()) / (len(stamps) - 1)
            window = Window([mean] * (len(stamps) - 1), self._waits)
        else:
            step_ms = [self.runtime.elapsed_ms(a, b) for a, b in itertools.pairwise(stamps)]
            forward_ms = [self.runtime.elapsed_ms(a, b) for a, b in zip(stamps, self._forwards, strict=False)]
            window = Window(step_ms, self._waits, forward_ms, self._late)
        self.step_ms += window.step_ms
        self.input_wait_ms += window.input_wait_ms
        self.host_was_late += window.host_was_late
        self._stamps, self._waits, self._forwards, self._late = [], [], [], []
        return window

    def summary(self) -> dict:
        """{"step_time_ms": {median, p10, p90, mean, n}, "input_wait_ms": mean, "host_bound": 0 to 1, the part of the
        steps for whose kernels the device waited}; null where no step was timed, or where it cannot be told."""
        n = len(self.step_ms)
        if n == 0:
            nothing = dict.fromkeys(("median", "p10", "p90", "mean"))
            return {"step_time_ms": {**nothing, "n": 0}, "input_wait_ms": None, "host_bound": None}
        p10, median, p90 = np.percentile(self.step_ms, [10, 50, 90])
        times = {"median": median, "p10": p10, "p90": p90, "mean": np.mean(self.step_ms)}
        return {
            "step_time_ms": {**{k: round(float(v), 4) for k, v in times.items()}, "n": n},
            "input_wait_ms": round(float(np.mean(self.input_wait_ms)), 4),
            "host_bound": round(float(np.mean(self.host_was_late)), 4) if self.host_was_late else None,
        }
