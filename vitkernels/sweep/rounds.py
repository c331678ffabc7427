"""Time the variants of a sweep in rounds, so that changes of the machine affect all variants equally.

In a round every variant has a fresh process, which builds it and warms up. The processes then train a few steps each in
turns: a random order, its reverse, and the same again (A C B B C A A C B B C A), so that a linear drift cancels. The
ratio of a round is one observation. Fresh processes matter: two processes of one variant can differ by 10 % on a CPU
for as long as they live (see docs/explanation/honest_timing.md), which no number of turns between them would show.
The random orders make two copies of one variant exchangeable; statistics.round_ratio builds on that.
"""

import contextlib
import json
import logging
import os
import random
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from vitkernels.provenance import ROOT
from vitkernels.runtime.machine import MachineWatch, is_busy
from vitkernels.runtime.nvml import THROTTLED
from vitkernels.sweep import timed_process

log = logging.getLogger(__name__)

_PASSES = 2  # a pass is one order and its reverse
_TURN_S = 0.4  # aim of a turn: long against the 10 ms of CPU accounting, short against the drift of a machine
_FEWEST_STEPS, _MOST_STEPS = 3, 100
_START_S, _ANSWER_S = 1800.0, 600.0  # longest waits: compilation with max-autotune takes minutes
Shuffle = Callable[[list], None]
NO_ROUNDS: Mapping[str, Any] = MappingProxyType({"rounds": [], "failed": {}, "seconds": 0.0})


class TurnError(RuntimeError):
    """A variant's process ended or does not answer; the message says why."""


@dataclass(frozen=True)
class Variant:
    """The information with which a process trains a variant.

    name: as in the verdict. settings: all settings of its run. log_file: receives what its processes print. device: the
    one that it trained on, None if unknown; a process that finds another one is not timed.
    """

    name: str
    settings: dict[str, Any]
    log_file: Path
    device: str | None = None


class Participant(Protocol):
    """One variant in a round."""

    @property
    def name(self) -> str: ...

    def take(self) -> dict[str, Any]:
        """Take a turn; return what timed_process.Turns.take does. Raises TurnError."""


class TimedProcess:
    """A process of timed_process.py, ready to take turns after `begin` and `finish_start`."""

    def __init__(self, variant: Variant, environment: Mapping[str, str]):
        self.variant, self.steps = variant, _FEWEST_STEPS
        ours, theirs = os.pipe()
        self._answers = os.fdopen(ours, "rb", buffering=0)
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        with open(variant.log_file, "wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", timed_process.__file__, str(theirs)],
                stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT, pass_fds=[theirs],
                env={**os.environ, **environment, "PYTHONPATH": path}, start_new_session=True,
            )  # fmt: skip
        os.close(theirs)
        self._rest = b""

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self) -> None:
        """Let the process build its variant and warm up, without waiting for it."""
        self._send(json.dumps({"settings": self.variant.settings}))

    def finish_start(self) -> None:
        """Wait until the process is ready. Raises TurnError if it is not, or has another device."""
        ready = self._receive(_START_S)
        if self.variant.device not in (None, ready["device"]):
            raise TurnError(f"trained on {self.variant.device}, but this machine has {ready['device']}")
        self.steps = min(_MOST_STEPS, max(_FEWEST_STEPS, round(_TURN_S * 1e3 / ready["step_ms"])))

    def take(self) -> dict[str, Any]:
        self._send(str(self.steps))
        return self._receive(_ANSWER_S)

    def _send(self, line: str) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise TurnError(self._reason()) from error

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TurnError(f"no answer after {seconds:.0f} s")
            received = self._answers.read(65536)
            if not received:
                raise TurnError(self._reason())
            self._rest += received
        answer, _, self._rest = self._rest.partition(b"\n")
        return json.loads(answer)

    def _reason(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        lines = [line.strip() for line in self.variant.log_file.read_text(errors="replace").splitlines()]
        last = next((line for line in reversed(lines) if line), "no output")
        return f"its process ended: {last[:200]}"

    def close(self) -> None:
        """End the process."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # type: ignore[union-attr]  # a pipe
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._answers.close()


@contextlib.contextmanager
def processes(variants: Sequence[Variant], environment: Mapping[str, str]) -> Iterator[list[TimedProcess]]:
    """Start a process per variant, all at once, and yield them when all are ready.

    One that fails is started again when the others are ready and idle: the GPU's memory may not hold all of them while
    they train. Raises TurnError, with `variant`, if it fails again.
    """
    with contextlib.ExitStack() as cleanup:

        def start(variant: Variant) -> TimedProcess:
            process = TimedProcess(variant, environment)
            cleanup.callback(process.close)
            process.begin()
            return process

        started = [start(variant) for variant in variants]
        ready = []
        for process in started:
            try:
                process.finish_start()
                ready.append(process)
            except TurnError:
                process.close()
        for variant in variants:
            if variant.name not in [process.name for process in ready]:
                process = start(variant)
                with _blamed_on(variant.name):
                    process.finish_start()
                ready.append(process)
        yield ready


class VariantError(TurnError):
    """A variant cannot be timed in turns; `name` says which."""

    def __init__(self, message: str, name: str):
        super().__init__(message)
        self.name = name


@contextlib.contextmanager
def _blamed_on(name: str) -> Iterator[None]:
    try:
        yield
    except VariantError:
        raise
    except TurnError as error:
        raise VariantError(str(error), name) from error


def take_turns(
    participants: Sequence[Participant],
    lap: Callable[[], dict[str, Any]],
    pids: frozenset[int] = frozenset(),
    shuffle: Shuffle = random.shuffle,
) -> dict[str, Any]:
    """Take the turns of one round.

    Return {"turns": [{"variant", and what its turn measured}] in their order, "machine": the laps of the passes,
    "disturbed": list of reasons}. Raises VariantError.

    Args:
        lap: returns the machine's figures since its last call, as MachineWatch.lap does.
        pids: the participants' processes, to recognize other processes on a GPU.
        shuffle: puts the participants into a random order.
    """
    turns, laps = [], []
    for _ in range(_PASSES):
        order = list(participants)
        shuffle(order)
        lap()
        for one in (*order, *reversed(order)):
            with _blamed_on(one.name):
                turns.append({"variant": one.name, **one.take()})
        laps.append(lap())
    return {"turns": turns, "machine": laps, "disturbed": _disturbed(laps, turns, pids)}


def _disturbed(laps: list[dict[str, Any]], turns: list[dict[str, Any]], pids: frozenset[int]) -> list[str]:
    """Return what disturbed a round: other load on the CPU or the GPU, or throttling."""
    reasons = []
    if any(map(is_busy, laps)):
        reasons.append("other processes used the CPU")
    samples = [turn["gpu"] for turn in turns if turn.get("gpu")]
    if any(_other_gpu_processes(sample["pids"], pids) for sample in samples):
        reasons.append("other processes used the GPU")
    throttled = {reason for sample in samples for reason in sample["reasons"] or () if reason in THROTTLED.values()}
    return reasons + [f"the GPU throttled ({reason})" for reason in sorted(throttled)]


def _other_gpu_processes(found: list[int] | None, own: frozenset[int]) -> int:
    """Return how many foreign processes hold the GPU; in a container the driver counts in numbers of its own."""
    if found is None:
        return 0
    return len(set(found) - own) if set(found) & own else max(0, len(found) - len(own))


def run_rounds(
    names: Sequence[str],
    start: Callable[[list[str]], contextlib.AbstractContextManager[Sequence[Participant]]],
    rounds: int,
    lap: Callable[[], dict[str, Any]],
    shuffle: Shuffle = random.shuffle,
    earlier: Mapping[str, Any] = NO_ROUNDS,
    keep: Callable[[dict[str, Any]], object] = lambda record: None,
) -> dict[str, Any]:
    """Run rounds until `rounds` of them were quiet.

    Up to twice as many run if some are disturbed, but none after `rounds` if most of those were. A variant that fails
    is left out from then on; without the first one, the baseline, there is nothing to compare, and the rounds end.

    Return {"rounds": [as take_turns returns them], "failed": {name: reason}, "seconds"}.

    Args:
        start: gives the variants of these names, in the order in which they start, fresh processes.
        earlier: what was kept of rounds that were interrupted; they count, and variants that failed stay left out.
        keep: is called with what would be returned, after each round and each failure.
    """
    begin = time.monotonic()
    found: list[dict[str, Any]] = list(earlier["rounds"])
    failed: dict[str, str] = dict(earlier["failed"])
    left, quiet = [name for name in names if name not in failed], sum(not one["disturbed"] for one in found)

    def record() -> dict[str, Any]:
        seconds = round(earlier["seconds"] + time.monotonic() - begin, 1)
        return {"rounds": list(found), "failed": dict(failed), "seconds": seconds}

    while len(left) > 1 and names[0] in left and quiet < rounds and len(found) < 2 * rounds:
        shuffle(order := list(left))
        try:
            with start(order) as participants:
                pids = frozenset(getattr(one, "pid", 0) for one in participants)
                found.append(take_turns(participants, lap, pids, shuffle))
        except VariantError as error:
            failed[error.name] = str(error)
            left.remove(error.name)
            keep(record())
            continue
        keep(record())
        disturbed = found[-1]["disturbed"]
        quiet += not disturbed
        log.info("round %d: %s", len(found), _describe(found[-1], names))
        if len(found) == len(earlier["rounds"]) + 1:
            left_s = (time.monotonic() - begin) * (rounds - quiet)
            log.info("%d more rounds take about %.0f s", rounds - quiet, left_s)
        if len(found) >= rounds and quiet < len(found) / 2:
            break
    return record()


def _describe(one: dict[str, Any], names: Sequence[str]) -> str:
    times = round_times(one)
    text = ", ".join(f"{name} {times[name]:.2f} ms" for name in names if name in times)
    return text + (f" ({'; '.join(one['disturbed'])})" if one["disturbed"] else "")


def round_times(one: dict[str, Any]) -> dict[str, float]:
    """Return the step time of each variant in a round, in ms: the geometric mean over its turns."""
    by_variant: dict[str, list[float]] = {}
    for turn in one["turns"]:
        by_variant.setdefault(turn["variant"], []).append(turn["step_ms"])
    return {name: statistics.geometric_mean(times) for name, times in by_variant.items()}


def time_in_rounds(
    variants: Sequence[Variant],
    rounds: int,
    environment: Mapping[str, str],
    earlier: Mapping[str, Any],
    keep: Callable[[dict[str, Any]], object],
) -> dict[str, Any]:
    """Return what run_rounds does for these variants, the first of which is the baseline."""
    by_name = {variant.name: variant for variant in variants}
    log.info("timing %d variants in %d rounds; sweep.rounds=null skips this", len(variants), rounds)
    return run_rounds(
        list(by_name),
        lambda names: processes([by_name[name] for name in names], environment),
        rounds,
        MachineWatch().lap,
        earlier=earlier,
        keep=keep,
    )
