"""Estimate the time of a compiled program from the schedules of its operations, in the compiler's order.

An operation takes the time of its own schedule (see simulate.py), or of the same kernel elsewhere in the program. An
operation without a readable schedule takes XLA's own `estimated_cycles`, or zero if XLA has none, and is listed in
`untimed`. Copies that XLA starts early (copy-start, slice-start) use the HBM while the operations in between do not;
the matching done operation waits for the rest. Copies that XLA starts before the program itself (cross-program
prefetch) are free here, as they are in a loop of steps.
"""

import math
import re
from dataclasses import dataclass, field, replace

from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.dump import CompilationDump
from vitkernels.tpu_estimate.hlo import HloOperation, operations_that_run
from vitkernels.tpu_estimate.simulate import KernelSchedule, simulate

_BUNDLES = "packed-bundles-post-ra"
_ARRAY = re.compile(r"([a-z]+\d*)[a-z0-9]*\[([\d,]*)\](?:\{([\d,]*)(?::T\((\d+),(\d+)\))?)?")


@dataclass
class OperationEstimate:
    """The estimate of one HLO operation; times in milliseconds."""

    name: str
    kind: str  # HLO opcode, or a custom call's target
    source: str  # the JAX or torch operation that it comes from
    estimate_ms: float
    kernel: str = ""  # the first operation that shares its kernel
    result: str = ""  # type and layout
    file: str = ""  # the Python file that it comes from, if the program records it
    xla_ms: float | None = None  # XLA's own estimated_cycles, which Pallas kernels do not have
    vmem: int | None = None  # bytes of scratch and operand windows
    schedule: KernelSchedule | None = None


@dataclass
class ProgramEstimate:
    """The estimate of a compiled program."""

    operations: list[OperationEstimate] = field(default_factory=list)
    prefetched: int = 0  # bytes that XLA copies alongside other operations
    untimed: list[str] = field(default_factory=list)  # operations without a readable schedule
    memory: dict[str, int] = field(default_factory=dict)  # HBM bytes, see CompilationDump.memory
    chip: Chip = CHIPS["v5e"]
    matrix_flops: int | None = None  # of a JAX program, see flops.py
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
    """Return the bytes of an array type as XLA writes it, padded to its tiles: `bf16[2,577]{1,0:T(8,128)(2,1)}`."""
    array = _ARRAY.match(text)
    assert array is not None, text
    kind, size_text, order_text, rows, lanes = array.groups()
    sizes = [int(n) for n in size_text.split(",") if n]
    order = [int(n) for n in (order_text or "").split(",") if n]
    if rows and len(order) > 1:
        for axis, tile in zip(order, (int(lanes), int(rows)), strict=False):
            sizes[axis] = -(-sizes[axis] // tile) * tile
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return math.prod(sizes) * bits // 8


class _BackgroundCopies:
    """Copies that overlap with other operations; times in seconds."""

    def __init__(self, chip: Chip):
        self._bandwidth = chip.core_bandwidth
        self.queued = 0.0
        self._left: dict[str, float] = {}

    def start(self, name: str, size: int) -> None:
        self.queued += size / self._bandwidth
        self._left[name] = self.queued

    def run(self, seconds: float) -> None:
        """Let the copies use the HBM for this long."""
        seconds = min(seconds, self.queued)
        self.queued -= seconds
        self._left = {name: left - seconds for name, left in self._left.items()}

    def wait(self, name: str) -> float:
        """Run the copies until this one is done; return how long that takes."""
        seconds = max(0.0, self._left.pop(name, 0.0))
        self.run(seconds)
        return seconds


def estimate_program(dump: CompilationDump) -> ProgramEstimate:
    """Return the estimate of the program that `compile_process.compile_in` compiled."""
    operations = operations_that_run(dump.module)
    program = ProgramEstimate(memory=dump.memory, chip=dump.chip, matrix_flops=dump.matrix_flops)
    copies = _BackgroundCopies(dump.chip)
    kernels = _kernels(dump, operations)
    for operation in operations:
        if operation.kind in ("copy-start", "slice-start"):
            if "cross_program_prefetch_index" not in operation.rest:
                arrays = [found[0] for found in re.finditer(r"[a-z]+\d+\w*\[[^}]*\}", operation.result)]
                size = array_bytes(arrays[operation.kind == "slice-start"])
                program.prefetched += size
                copies.start(operation.name, size)
        elif operation.kind in ("copy-done", "slice-done"):
            waited_ms = copies.wait(re.findall(r"^%([\w.\-]+)", operation.rest)[0]) * 1e3
            program.operations.append(
                OperationEstimate(operation.name, operation.kind, "", waited_ms, kernel=operation.kind)
            )
        else:
            estimate = replace(
                kernels[operation.identity],
                name=operation.name,
                source=_metadata("op_name", operation.rest),
                file=_metadata("source_file", operation.rest),
            )
            if estimate.schedule is None or not estimate.schedule.trustworthy:
                program.untimed.append(operation.name)
            else:
                copies.run((estimate.estimate_ms - estimate.schedule.memory_ms) / 1e3)
            program.operations.append(estimate)
    return program


def _metadata(key: str, text: str) -> str:
    found = re.search(rf'{key}="([^"]*)"', text)
    return found[1] if found else ""


def _kernels(dump: CompilationDump, operations: list[HloOperation]) -> dict[str, OperationEstimate]:
    """Return the estimate of each distinct kernel by identity; any operation that shares it may hold the schedule."""
    same: dict[str, list[HloOperation]] = {}
    for operation in operations:
        same.setdefault(operation.identity, []).append(operation)
    return {identity: _estimate_kernel(dump, found) for identity, found in same.items()}


def _estimate_kernel(dump: CompilationDump, same: list[HloOperation]) -> OperationEstimate:
    operation = next((op for op in same if dump.text(op.name, _BUNDLES) is not None), same[0])
    cycles = re.search(r'"estimated_cycles":"(\d+)"', operation.rest)
    estimate = OperationEstimate(operation.name, operation.kind, "", 0.0, same[0].name, operation.result)
    estimate.xla_ms = int(cycles[1]) / dump.chip.clock_hz * 1e3 if cycles else None
    estimate.estimate_ms = estimate.xla_ms or 0.0
    bundles = dump.text(operation.name, _BUNDLES)
    if bundles is None:
        return estimate
    utilization = dump.text(operation.name, "pre-delay_hlo-static-per-bundle-utilization") or ""
    estimate.schedule = simulate(bundles, utilization, dump.chip)
    if estimate.schedule.trustworthy:
        estimate.estimate_ms = estimate.schedule.estimate_ms
    estimate.vmem = _vmem(dump.text(operation.name, "post-ra") or "")
    return estimate


def _vmem(text: str) -> int | None:
    """Return the bytes of VMEM that a kernel declares, spills included; arrays that XLA keeps there do not count."""
    sizes = re.findall(r"#allocation\w+ \[.*?space=vmem, size = 0x([0-9a-f]+)", text)
    return sum(int(size, 16) for size in sizes) if sizes else None
