"""Time training steps on the device, without evaluation, checkpoints and logging, and split each step's time."""

import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import numpy as np

from vitkernels.runtime import Runtime

_NO_WAIT_MS = 1.0  # after a longer input wait, an idle device does not show whether the host launches late
PARTS = ("input_wait_ms", "host_late_ms", "device_busy_ms", "rest_ms")  # of a step

# Holding the device costs the time of a step, so it is rare, and is used only if no step was queued completely.
_STEPS_BEFORE_HOLD = 8
_STEPS_BETWEEN_HOLDS = 500
_HOLDS_IN_A_ROW = 3
_LONGEST_HOLD_MS = 500.0


@dataclass
class Window:
    """The steps between two synchronizations of the device.

    step_ms[i] is the sum of the i-th entries of the next four lists. The last three are empty if the device cannot
    distinguish them.
    input_wait_ms: the device waited for input.
    host_late_ms: the device waited for the host to launch its work; on the CPU, the training thread did not run.
    device_busy_ms: the device computed.
    rest_ms: the remainder, for example because of a lower clock or another program on the GPU.
    """

    step_ms: list[float] = field(default_factory=list)
    input_wait_ms: list[float] = field(default_factory=list)
    host_late_ms: list[float] = field(default_factory=list)
    device_busy_ms: list[float] = field(default_factory=list)
    rest_ms: list[float] = field(default_factory=list)
    forward_done_ms: list[float] = field(
        default_factory=list
    )  # from the start of the step; contains no wait for other ranks
    host_was_late: list[bool] = field(default_factory=list)  # of some steps; see StepTimer.forward_done

    def split(self) -> dict[str, float | None]:
        """Return the mean of each part of a step, in ms; None for a part that the device cannot measure."""
        return {name: mean(getattr(self, name)) for name in PARTS}


def mean(values: list[float]) -> float | None:
    """Return the mean, None for no values."""
    return sum(values) / len(values) if values else None


class Totals:
    """The windows of a run, in 8 bytes per step: runs may take millions of steps.

    step_ms: the time of each step, for the percentiles.
    sums, counts: sum and number of the entries, for each part of a step and host_was_late.
    """

    def __init__(self) -> None:
        self.step_ms: array[float] = array("d")
        self.sums = dict.fromkeys((*PARTS, "host_was_late"), 0.0)
        self.counts = dict.fromkeys(self.sums, 0)

    def add(self, window: Window) -> None:
        self.step_ms.extend(window.step_ms)
        for name in self.sums:
            values = getattr(window, name)
            self.sums[name] += sum(values)
            self.counts[name] += len(values)

    def mean(self, name: str) -> float | None:
        """Return the mean, rounded to 4 digits; None for no entries."""
        return round(self.sums[name] / self.counts[name], 4) if self.counts[name] else None


@dataclass
class _Step:
    """The stamps of one step.

    waits: stamps before and after each wait for input, and the host's wait in ms.
    was_idle: whether the device caught up with the host, in the forward pass or after it.
    was_queued: whether the entire step was launched before the device began it, so that it had no gaps.
    cpu_s: time of the training thread on a CPU core, without waits for input.
    """

    begin: Any
    host_begin: float
    cpu_begin: float
    end: Any = None
    forward: Any = None
    waits: list[tuple[Any, Any, float]] = field(default_factory=list)
    was_idle: bool = False
    was_queued: bool = False
    cpu_s: float = 0.0

    @property
    def host_wait_ms(self) -> float:
        return sum(ms for _, _, ms in self.waits)


class StepTimer:
    """Time every training step after the first `warmup_steps` of this process, without waiting for the device.

    A step lasts from the end of the previous step to its own end, so it includes gaps in which the device waits for
    the host or for input. If the device cannot time single steps (XLA), each step gets its window's mean. Nothing
    between `stop` and `start` counts: evaluation, checkpoints and logging are excluded.

    Per step: `with waiting(): batch = next(...)`, forward, forward_done(), backward and so on, step_done(). At log
    boundaries: stop(), then start(). A timer times nothing until its first `start`.

    A GPU's idle time during waits for input is measured: it is the difference of the stamps before and after the wait.
    Its busy time comes from steps that were queued completely before the GPU began them. If there are no such steps,
    because the GPU always waits for something, the GPU is held for about the time of one step, at most once in 500
    steps, while the host queues a step; the hold is not part of any step's time. Time beyond input wait and busy time
    counts as host late if the GPU ran out of work, and as rest otherwise.

    Args:
        runtime: the device's clock.
        warmup_steps: first steps to exclude: compilation, autotuning, caches.
        steps_wait: whether each step waits for the device at its end, which hides how fast the host launches.
    """

    def __init__(self, runtime: Runtime, warmup_steps: int, steps_wait: bool = False):
        self.runtime = runtime
        self.steps_wait = steps_wait
        self.warmup_left = warmup_steps
        self.total = Totals()
        self._steps: list[_Step] = []
        self._step: _Step | None = None
        self._late: list[bool] = []
        self._busy_ms: float | None = None  # the busy time of a step without gaps
        self._has_queued = False  # whether there was such a step
        self._unqueued = 0  # steps since the last one that was queued completely, or since the last hold
        self._holds = 0

    def start(self) -> None:
        """Begin a window. The device must be idle, as it is before the first step and after `stop`."""
        self._steps, self._late = [], []
        self._step = self._begin_step(self.runtime.stamp())

    def _begin_step(self, stamp: Any) -> _Step:
        return _Step(stamp, time.perf_counter(), time.thread_time())

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measure the wait for the next batch: the host's wait, and the device's idle time during it."""
        before, begin, cpu = self.runtime.stamp(), time.perf_counter(), time.thread_time()
        yield
        if self._step is not None:
            ms = (time.perf_counter() - begin) * 1e3
            self._step.waits.append((before, self.runtime.stamp(), ms))
            self._step.cpu_s -= time.thread_time() - cpu

    def forward_done(self) -> None:
        """Mark the end of a forward pass on the host; if a step has several, the last counts.

        If the device has completed the previous step by now, it was idle while the host launched this forward pass. The
        first step of a window is skipped, because the device was synchronized before it.
        """
        step = self._step
        if not self.runtime.per_step_clock or step is None:
            return
        if step.forward is None and not self.steps_wait:
            late = self.runtime.has_reached(step.begin)
            step.was_idle = bool(late)
            if self._steps and step.host_wait_ms < _NO_WAIT_MS and late is not None:
                self._late.append(late)
        step.forward = self.runtime.stamp()

    def step_done(self) -> None:
        step = self._step
        if step is None:
            return
        step.cpu_s += time.thread_time() - step.cpu_begin
        step.end = self.runtime.stamp()
        reached = self.runtime.has_reached(step.begin) if self.runtime.per_step_clock else None
        step.was_queued = reached is False and not self.steps_wait
        if reached and step.forward is not None:
            step.was_idle |= bool(self.runtime.has_reached(step.forward))
        if self.warmup_left > 0:
            self.warmup_left -= 1
            if self.warmup_left == 0 and not self.runtime.per_step_clock:
                self.runtime.synchronize()  # so that the first timed window contains no warm-up work
            self.start()
            return
        self._steps.append(step)
        held = reached is not None and self._hold(step)
        self._step = self._begin_step(self.runtime.stamp() if held else step.end)

    def _hold(self, step: _Step) -> bool:
        """Keep the device from beginning the next step for as long as the host took for this one, if that is due."""
        if step.was_queued:
            self._has_queued, self._unqueued, self._holds = True, 0, 0
            return False
        self._unqueued += 1
        rarely = self._has_queued or self._holds >= _HOLDS_IN_A_ROW
        due = _STEPS_BETWEEN_HOLDS if rarely else _STEPS_BEFORE_HOLD
        if self.steps_wait or self._unqueued < due:
            return False
        if self._unqueued >= _STEPS_BETWEEN_HOLDS:
            self._holds = 0
        self._holds, self._unqueued = self._holds + 1, 0
        host_ms = (time.perf_counter() - step.host_begin) * 1e3
        return self.runtime.hold(min(_LONGEST_HOLD_MS, 1.5 * self._holds * host_ms + 2))

    def stop(self) -> Window:
        """Wait for the device and return the window's steps, which also go into the run's totals."""
        self.runtime.synchronize()
        steps, elapsed = self._steps, self.runtime.elapsed_ms
        if not self.runtime.per_step_clock:
            window = Window(input_wait_ms=[step.host_wait_ms for step in steps])
            if steps:
                window.step_ms = [elapsed(steps[0].begin, self.runtime.stamp()) / len(steps)] * len(steps)
        else:
            window = self._window(steps)
            window.forward_done_ms = [elapsed(s.begin, s.forward) for s in steps if s.forward is not None]
            window.host_was_late = self._late
        self.total.add(window)
        self._steps, self._late, self._step = [], [], None
        return window

    def _window(self, steps: list[_Step]) -> Window:
        """Return the times of steps on a device that can time them."""
        elapsed = self.runtime.elapsed_ms
        step_ms = [elapsed(step.begin, step.end) for step in steps]
        if not steps or self.runtime.has_reached(steps[-1].end) is None:  # the host itself computes
            waits = [min(ms, step.host_wait_ms) for ms, step in zip(step_ms, steps, strict=True)]
            busy = [min(ms - wait, 1e3 * step.cpu_s) for ms, wait, step in zip(step_ms, waits, steps, strict=True)]
            late = [ms - wait - cpu for ms, wait, cpu in zip(step_ms, waits, busy, strict=True)]
            return Window(step_ms, waits, late, busy, [0.0] * len(steps))
        waits = [sum(elapsed(before, after) for before, after, _ in step.waits) for step in steps]
        active = [ms - wait for ms, wait in zip(step_ms, waits, strict=True)]
        if queued := [ms for ms, step in zip(active, steps, strict=True) if step.was_queued]:
            self._busy_ms = median(queued)
        if self._busy_ms is None:
            return Window(step_ms, waits)
        busy = [min(ms, self._busy_ms) for ms in active]
        left = [ms - own for ms, own in zip(active, busy, strict=True)]
        late = [ms if step.was_idle else 0.0 for ms, step in zip(left, steps, strict=True)]
        return Window(step_ms, waits, late, busy, [ms - own for ms, own in zip(left, late, strict=True)])

    def summary(self) -> dict:
        """Return {"step_time_ms": {median, p10, p90, mean, n}, the mean parts of a step in ms, "host_bound"}.

        The parts are input_wait_ms, host_late_ms, device_busy_ms and rest_ms, see Window. host_bound is the share, 0 to
        1, of steps in which the device waited for kernel launches. Entries are None if no step was timed or the device
        cannot measure them.
        """
        total, n = self.total, len(self.total.step_ms)
        parts = {name: total.mean(name) for name in PARTS} | {"host_bound": total.mean("host_was_late")}
        if n == 0:
            return {"step_time_ms": {**dict.fromkeys(("median", "p10", "p90", "mean")), "n": 0}, **parts}
        p10, p50, p90 = np.percentile(total.step_ms, [10, 50, 90])
        times = {"median": p50, "p10": p10, "p90": p90, "mean": np.mean(total.step_ms)}
        return {
            "step_time_ms": {**{k: round(float(v), 4) for k, v in times.items()}, "n": n},
            **parts,
        }
