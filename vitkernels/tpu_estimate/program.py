"""The estimated time of a whole compiled program: its operations in the compiler's order, each from its schedule.

An operation's time is its schedule's (tpu_schedule), or that of the same kernel elsewhere in the program; one that has
no readable schedule takes XLA's own `estimated_cycles`, or nothing, and is named in `untimed`. Copies that XLA starts
early (copy-start, slice-start) use the HBM while the operations in between do not; waiting for the rest is the time of
the matching done. Copies that XLA starts before the program itself (cross-program prefetch) are free here, as they are
in a loop of steps.
"""

import re
from dataclasses import dataclass, field, replace

from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.dump import Dump
from vitkernels.tpu_estimate.hlo import Line, operations
from vitkernels.tpu_estimate.simulate import Schedule, simulate

_BUNDLES = "packed-bundles-post-ra"
_ARRAY = re.compile(r"([a-z]+\d*)[a-z0-9]*\[([\d,]*)\](?:\{([\d,]*)(?::T\((\d+),(\d+)\))?)?")


@dataclass
class Operation:
    """One HLO operation: milliseconds, estimated."""

    name: str
    kind: str  # the HLO opcode, or the custom call's target
    source: str  # the JAX or torch operation it comes from
    estimate_ms: float
    kernel: str = ""  # the first operation that is the same kernel
    result: str = ""  # type and layout
    file: str = ""  # the Python file it comes from, where the program says so
    xla_ms: float | None = None  # XLA's own estimated_cycles; it has none for Pallas kernels
    vmem: int | None = None  # bytes of scratch and operands' windows
    schedule: Schedule | None = None


@dataclass
class Program:
    """A compiled program's estimate."""

    operations: list[Operation] = field(default_factory=list)
    prefetched: int = 0  # bytes that XLA copies beside other operations
    untimed: list[str] = field(default_factory=list)  # operations that the estimate lacks or takes from XLA
    memory: dict[str, int] = field(default_factory=dict)  # HBM bytes, see tpu_dump.Dump.memory
    chip: Chip = CHIPS["v5e"]
    note: str = ""  # such as the block sizes that were chosen

    @property
    def estimate_ms(self) -> float:
        return sum(operation.estimate_ms for operation in self.operations)

    @property
    def compute_ms(self) -> float:
        return sum(o.schedule.compute_ms for o in self.operations if o.schedule)

    @property
    def hbm_bytes(self) -> int:
        return self.prefetched + sum(o.schedule.read + o.schedule.written for o in self.operations if o.schedule)

    @property
    def memory_ms(self) -> float:
        return self.hbm_bytes / self.chip.core_bandwidth * 1e3


def array_bytes(text: str) -> int:
    """Bytes of an array as XLA writes its type, padded to whole tiles: `bf16[2,577]{1,0:T(8,128)(2,1)}`."""
    kind, sizes, order, rows, lanes = _ARRAY.match(text).groups()
    sizes = [int(n) for n in sizes.split(",") if n]
    order = [int(n) for n in (order or "").split(",") if n]
    if rows and len(order) > 1:
        for axis, tile in zip(order, (int(lanes), int(rows)), strict=False):
            sizes[axis] = -(-sizes[axis] // tile) * tile
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    count = 1
    for n in sizes:
        count *= n
    return count * bits // 8


class _Background:
    """Copies that run beside other operations; times in seconds."""

    def __init__(self, chip: Chip):
        self._bandwidth = chip.core_bandwidth
        self.queued = 0.0
        self._left: dict[str, float] = {}

    def start(self, name: str, size: int) -> None:
        self.queued += size / self._bandwidth
        self._left[name] = self.queued

    def run(self, seconds: float) -> None:
        """So long the HBM is free for them."""
        seconds = min(seconds, self.queued)
        self.queued -= seconds
        self._left = {name: left - seconds for name, left in self._left.items()}

    def wait(self, name: str) -> float:
        """For one of them to be done."""
        seconds = max(0.0, self._left.pop(name, 0.0))
        self.run(seconds)
        return seconds


def estimate(dump: Dump) -> Program:
    """The estimate of what `tpu_dump.compile_in` compiled."""
    lines = operations(dump.module)
    program, background = Program(memory=dump.memory, chip=dump.chip), _Background(dump.chip)
    kernels = _kernels(dump, lines)
    for line in lines:
        if line.kind in ("copy-start", "slice-start"):
            if "cross_program_prefetch_index" not in line.rest:
                arrays = [found[0] for found in re.finditer(r"[a-z]+\d+\w*\[[^}]*\}", line.result)]
                size = array_bytes(arrays[line.kind == "slice-start"])
                program.prefetched += size
                background.start(line.name, size)
        elif line.kind in ("copy-done", "slice-done"):
            seconds = background.wait(re.match(r"%([\w.\-]+)", line.rest)[1])
            waited = Operation(line.name, line.kind, "", seconds * 1e3, line.kind)
            program.operations.append(waited)
        else:
            origin = {key: found[1] for key in ("op_name", "source_file") if (found := _note(key, line.rest))}
            operation = replace(kernels[line.identity], name=line.name, source=origin.get("op_name", ""))
            operation.file = origin.get("source_file", "")
            if operation.schedule is None or not operation.schedule.trustworthy:
                program.untimed.append(line.name)
            else:
                background.run((operation.estimate_ms - operation.schedule.memory_ms) / 1e3)
            program.operations.append(operation)
    return program


def _note(key: str, text: str) -> re.Match | None:
    return re.search(rf'{key}="([^"]*)"', text)


def _kernels(dump: Dump, lines: list[Line]) -> dict[str, Operation]:
    """By identity: one operation of each kernel, with the schedule that was dumped for whichever of its kind."""
    same: dict[str, list[Line]] = {}
    for line in lines:
        same.setdefault(line.identity, []).append(line)
    return {identity: _operation(dump, found) for identity, found in same.items()}


def _operation(dump: Dump, same: list[Line]) -> Operation:
    line = next((line for line in same if dump.text(line.name, _BUNDLES) is not None), same[0])
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line.rest)
    operation = Operation(line.name, line.kind, "", 0.0, same[0].name, line.result)
    operation.xla_ms = int(cycles[1]) / dump.chip.clock_hz * 1e3 if cycles else None
    operation.estimate_ms = operation.xla_ms or 0.0
    bundles = dump.text(line.name, _BUNDLES)
    if bundles is None:
        return operation
    utilisation = dump.text(line.name, "pre-delay_hlo-static-per-bundle-utilization") or ""
    operation.schedule = simulate(bundles, utilisation, dump.chip)
    if operation.schedule.trustworthy:
        operation.estimate_ms = operation.schedule.estimate_ms
    operation.vmem = _vmem(dump.text(line.name, "post-ra") or "")
    return operation


def _vmem(text: str) -> int | None:
    """Bytes of VMEM that a kernel declares, spills included; arrays that XLA keeps there are not in it."""
    sizes = re.findall(r"#allocation\w+ \[.*?space=vmem, size = 0x([0-9a-f]+)", text)
    return sum(int(size, 16) for size in sizes) if sizes else None
