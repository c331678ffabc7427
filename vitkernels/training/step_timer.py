"""Time training steps as the device sees them, excluding everything that is not training."""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from vitkernels.runtime import Runtime

_NO_WAIT_MS = 1.0  # after a longer input wait, an idle device says nothing about how fast the host launches


@dataclass
class Window:
    """The steps between two synchronizations of the device."""

    step_ms: list[float] = field(default_factory=list)
    input_wait_ms: list[float] = field(default_factory=list)
    forward_done_ms: list[float] = field(
        default_factory=list
    )  # from the start of the step; contains no wait for other ranks
    host_was_late: list[bool] = field(default_factory=list)  # of steps that can be judged; see StepTimer.forward_done


class StepTimer:
    """Time every training step after the first `warmup_steps` of this process, without waiting for the device.

    A step lasts from the end of the previous step to its own end, so it includes gaps in which the device waits for
    the host or for input. If the device cannot time single steps (XLA), each step gets its window's mean. Nothing
    between `stop` and `start` counts: evaluation, checkpoints and logging are excluded.

    Per step: `with waiting(): batch = next(...)`, forward, forward_done(), backward and so on, step_done(). At log
    boundaries: stop(), then start(). A timer that was never started times nothing until `start`.

    Args:
        runtime: the device's clock.
        warmup_steps: first steps to exclude: compilation, autotuning, caches.
        steps_wait: whether each step waits for the device at its end, which hides how fast the host launches.
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
        self._forward = None

    def start(self) -> None:
        """Begin a window. The device must be idle, as it is before the first step and after `stop`."""
        self._stamps = [self.runtime.stamp()]
        self._forwards = []
        self._late = []
        self._waits = []
        self._wait = 0.0
        self._forward = None

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the host's wait for its next batch."""
        begin = time.perf_counter()
        yield
        self._wait += (time.perf_counter() - begin) * 1e3

    def forward_done(self) -> None:
        """Mark the end of a forward pass on the host; if a step has several, the last counts.

        If the device has completed the previous step by now, it was idle while the host launched this forward pass. The
        first step of a window cannot be judged, because the device was synchronized before it.
        """
        if not self.runtime.per_step_clock:
            return
        first_in_step, first_in_window = self._forward is None, len(self._stamps) <= 1  # 0: never started
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
                self.runtime.synchronize()  # so that the first timed window contains no warm-up work
            self.start()

    def stop(self) -> Window:
        """Wait for the device and return the window's steps, which also go into the run's totals."""
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
        """Return {"step_time_ms": {median, p10, p90, mean, n}, "input_wait_ms": mean, "host_bound": share of steps}.

        host_bound is the share, 0 to 1, of steps in which the device waited for kernel launches. Entries are None if no
        step was timed or the device cannot tell.
        """
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
