"""Read what limits this machine: its memory, other load during a timing (load average, processes), the CPU's clock."""

import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
_LISTED_SHARE = 0.1  # of a core: processes below it are not listed
_MAX_LISTED = 4
_PROC = Path("/proc")
_MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class _Process:
    parent: int
    name: str
    own_s: float  # CPU seconds of the process
    with_children_s: float  # CPU seconds including children that ended


@dataclass(frozen=True)
class _Snapshot:
    wall: float
    busy_s: float | None  # CPU seconds of the machine, None without /proc/stat
    processes: Mapping[int, _Process]


class MachineWatch:
    """Watch the machine from its construction, or the last `lap`, to the next `lap`.

    This process and its descendants count as own load, everything else as other load. On a
    virtual machine, CPU time that the host gave to other guests counts as other load too.
    """

    def __init__(self) -> None:
        self._before = _snapshot()

    def lap(self) -> dict[str, Any]:
        """Return the figures since the last lap, and begin the next one.

        Keys: load_1min; seconds; cores (of the machine); other_cores, the CPU cores that other processes used on
        average, None if the system does not say; others, up to four of those processes as {"name", "cores"};
        cpu_mhz, the mean clock now, None if unknown.
        """
        before, now = self._before, _snapshot()
        self._before = now
        seconds = max(now.wall - before.wall, 1e-9)
        own = _descendants(now.processes, os.getpid()) | _descendants(before.processes, os.getpid())
        # A child that ended since then is in its parent's time now, and was on its own before.
        own_s = _seconds_of(now, own) - _seconds_of(before, own)
        other = None
        if now.busy_s is not None and before.busy_s is not None:
            other = round(max(0.0, now.busy_s - before.busy_s - own_s) / seconds, 3)
        return {
            "load_1min": round(os.getloadavg()[0], 2),
            "seconds": round(seconds, 3),
            "cores": os.cpu_count() or 1,
            "other_cores": other,
            "others": _others(before, now, own, seconds),
            "cpu_mhz": cpu_mhz(),
        }


def is_busy(machine: Mapping[str, Any]) -> bool:
    """Return whether other processes took enough of the CPU to change step times: see `busy_cores`."""
    other = machine["other_cores"]
    return other is not None and other > busy_cores(machine["cores"])


def busy_cores(cores: int) -> float:
    """Return how many cores others must use for a machine to count as busy: 5 % of them, at least a quarter.

    An idle Linux machine with two cores uses 0.02 to 0.1 of one, and the kernel counts CPU time in hundredths of a
    second, which over half a second is an error of 0.04.
    """
    return max(0.25, 0.05 * cores)


def host_memory_bytes() -> int | None:
    """Return the memory and swap that this process may use, as its control group limits them; None if unknown."""
    try:
        text = (_PROC / "meminfo").read_text()
    except OSError:
        return None
    sizes = dict(re.findall(r"^(MemTotal|SwapTotal):\s+(\d+) kB$", text, re.MULTILINE))
    if "MemTotal" not in sizes:
        return None
    swap = 1024 * int(sizes.get("SwapTotal", 0))
    memory = 1024 * int(sizes["MemTotal"])
    for path in _MEMORY_LIMITS:  # of a container, which sees its own group as the root
        try:
            memory = min(memory, int(path.read_text()))
        except (OSError, ValueError):  # the other version of control groups, or "max"
            continue
    return memory + swap


def cpu_mhz() -> float | None:
    """Return the mean clock of the cores in MHz as the kernel reports it now; None if it does not."""
    clocks = []
    for path in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_cur_freq"):
        try:
            clocks.append(int(path.read_text()) / 1e3)
        except (OSError, ValueError):
            continue
    if not clocks:
        try:
            text = (_PROC / "cpuinfo").read_text()
        except OSError:
            return None
        clocks = [float(mhz) for mhz in re.findall(r"^cpu MHz\s*:\s*([\d.]+)", text, re.MULTILINE)]
    return round(sum(clocks) / len(clocks), 1) if clocks else None


def _snapshot() -> _Snapshot:
    return _Snapshot(time.monotonic(), _busy_seconds(), dict(_processes()))


def _busy_seconds() -> float | None:
    try:
        words = (_PROC / "stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    # user, nice, system, idle, iowait, irq, softirq, steal
    values = [int(word) for word in words[1:9]]
    busy = sum(values) - values[3] - values[4]
    return busy / _TICKS if sum(values) else None  # a sandbox shows zeros


def _processes() -> Iterator[tuple[int, _Process]]:
    for path in _PROC.glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except OSError:  # it has just ended
            continue
        name, _, rest = text.partition("(")[2].rpartition(")")
        words = rest.split()
        own, ended = (int(words[i]) + int(words[i + 1]) for i in (11, 13))
        yield int(path.parent.name), _Process(int(words[1]), name, own / _TICKS, (own + ended) / _TICKS)


def _seconds_of(snapshot: _Snapshot, pids: set[int]) -> float:
    return sum(snapshot.processes[pid].with_children_s for pid in pids if pid in snapshot.processes)


def _descendants(processes: Mapping[int, _Process], root: int) -> set[int]:
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    found, left = {root}, [root]
    while left:
        new = [pid for pid in children.get(left.pop(), ()) if pid not in found]
        found.update(new)
        left += new
    return found


def _others(before: _Snapshot, now: _Snapshot, own: set[int], seconds: float) -> list[dict[str, Any]]:
    shares: list[tuple[float, str]] = []
    for pid, process in now.processes.items():
        if pid not in own:
            used = process.own_s - (before.processes[pid].own_s if pid in before.processes else 0.0)
            if used / seconds >= _LISTED_SHARE:
                shares.append((round(used / seconds, 2), process.name))
    return [{"name": name, "cores": cores} for cores, name in sorted(shares, reverse=True)[:_MAX_LISTED]]
