"""Estimate how long one compiled TPU kernel takes by simulating the schedule that libtpu dumped.

The dump's `packed-bundles-post-ra` text holds one VLIW bundle per modelled cycle, with stalls as empty bundles. The
scalar instructions that decide branches and copies are executed, so loops have their true trip counts; vector
instructions only take their cycle. Copies to and from HBM share one queue: each occupies the HBM for its bytes over the
bandwidth, and lands a fixed latency later. A wait for a copy that has not landed stalls. The estimate is the length of
this timeline, which is at least the compute time (bundles) and at least the memory time (bytes over bandwidth).

Clock and bandwidth are the chip's published figures (chips.py). The latency is the one at which the largest error over
the published timings of kernels that wait for copies is smallest (validate.py: blocked matmuls, JAX's flash attention
on v5e, -8 to +8 %); it is used unchanged for the other chips. On a chip of two cores, the estimate is that of core 0
with half the bandwidth: scalar memory that a program reads but does not write holds the core's number.
"""

from collections import Counter
from dataclasses import dataclass, field

from vitkernels.tpu_estimate.bundles import Decoder, ScalarInstruction, parse_bundles, parse_utilization, relevant
from vitkernels.tpu_estimate.chips import CHIPS, Chip

COPY_LATENCY_CYCLES = 733
LOCAL_LATENCY_CYCLES, LOCAL_BYTES_PER_CYCLE = 100, 1024  # copies within the chip, rarely on the critical path
GRANULE_BYTES = 32
DELAY_SLOTS = 4  # bundles after a branch that run whether it is taken or not


@dataclass
class KernelSchedule:
    """The simulated schedule of one kernel; times in cycles of the chip's clock."""

    bundles: int  # in the program
    cycles: float  # of the timeline: bundles issued, stalls, and copies still in flight at the end
    issued: int  # bundles executed, empty ones included
    empty: int  # executed bundles that issue nothing
    stalled: float  # cycles spent waiting for copies
    read: int  # bytes from HBM
    written: int  # bytes to HBM
    busy: dict[str, float] = field(default_factory=dict)  # each unit's share of its capacity over the timeline
    spills: int = 0  # vector registers spilled to VMEM, over the entire run
    fills: int = 0  # vector registers filled from VMEM
    unknown: tuple[str, ...] = ()  # inputs of branches or copies that cannot be interpreted
    complete: bool = True  # False if the simulation ended at its limit of branches
    chip: Chip = CHIPS["v5e"]

    @property
    def trustworthy(self) -> bool:
        return self.complete and not self.unknown

    @property
    def compute_ms(self) -> float:
        return self.issued / self.chip.clock_hz * 1e3

    @property
    def memory_ms(self) -> float:
        return (self.read + self.written) / self.chip.core_bandwidth * 1e3

    @property
    def estimate_ms(self) -> float:
        """Return the length of the timeline: max(compute, memory), plus what latency and ordering add."""
        return self.cycles / self.chip.clock_hz * 1e3


class _CopyQueue:
    """Copies in flight; those to and from HBM are serialized. Times in cycles."""

    def __init__(self, chip: Chip):
        self._cycles_per_byte = chip.clock_hz / chip.core_bandwidth
        self.free = 0.0  # when the last HBM copy leaves the queue
        self.read = self.written = 0
        self._landing: dict[int, float] = {}  # time by sync flag

    def start(self, now: float, opcode: str, granules: int, flag: int) -> None:
        size = granules * GRANULE_BYTES
        source, target = opcode.removeprefix("dma.").split("_to_")
        if "hbm" not in (source, target):
            lands = now + LOCAL_LATENCY_CYCLES + size / LOCAL_BYTES_PER_CYCLE
        else:
            self.read += size * (source == "hbm")
            self.written += size * (target == "hbm")
            self.free = max(now, self.free) + size * self._cycles_per_byte
            lands = self.free + COPY_LATENCY_CYCLES
        self._landing[flag] = max(lands, self._landing.get(flag, 0.0))

    def wait(self, now: float, flag: int) -> float:
        """Return the cycles until every copy that signals the flag has landed."""
        return max(0.0, self._landing.pop(flag, 0.0) - now)


@dataclass(frozen=True)
class _Segment:
    """Bundles that run in sequence: up to the end of a branch's delay slots, or up to a branch target."""

    start: int
    end: int
    steps: tuple[tuple[int, list[ScalarInstruction]], ...]  # (bundles issued so far, instructions)


class _Core:
    """Interpret a program's scalar instructions; all instructions of a bundle read before any of them writes."""

    def __init__(self, bundles, chip: Chip):
        self.chip = chip
        decoder = Decoder(bundles)
        decoded = [[i for text in bundle if (i := decoder.decode(text)) is not None] for bundle in bundles]
        self.program, self.unknown = relevant(decoded)
        self.registers = decoder.values
        self.targets = {i.jump for bundle in self.program for i in bundle if i.jump is not None}
        self.copies = _CopyQueue(chip)
        self.issued, self.stalled = 0, 0.0
        self.memory: dict[int, int] = {}
        self.divided: dict[str | None, list[int]] = {}
        self.segments: dict[int, _Segment] = {}
        self.visits: Counter[int] = Counter()  # executions of each segment, by its start

    def run(self, max_segments: int) -> bool:
        """Run the program; return False if it has not ended after this many segments."""
        segments, at = self.segments, 0
        for _ in range(max_segments):
            if at >= len(self.program):
                return True
            if at not in segments:
                segments[at] = self._segment(at)
            segment = segments[at]
            jump = None
            for offset, instructions in segment.steps:
                taken = self._step(self.issued + offset, instructions)
                jump = taken if jump is None else jump
            self.issued += segment.end - segment.start
            self.visits[at] += 1
            at = segment.end if jump is None else jump
        return False

    def _segment(self, start: int) -> _Segment:
        steps, end, stop = [], start, len(self.program)
        while end < stop:
            if instructions := self.program[end]:
                steps.append((end - start + 1, instructions))
                if stop == len(self.program) and any(i.jump is not None for i in instructions):
                    stop = min(end + 1 + DELAY_SLOTS, stop)
            end += 1
            if end in self.targets and stop == len(self.program):
                break
        return _Segment(start, end, tuple(steps))

    def _step(self, issued: int, instructions: list[ScalarInstruction]) -> int | None:
        """Execute a bundle's instructions; return the target of a taken branch, or None."""
        registers, writes, jump = self.registers, [], None
        for i in instructions:
            if i.predicate is not None and bool(registers[i.predicate]) != i.wanted:
                continue
            values = [
                registers[slots[0]] if len(slots) == 1 else sum(registers[slot] for slot in slots or ())
                for slots in i.operands
            ]
            if i.jump is not None:
                jump = i.jump
            elif i.opcode == "dma.done.wait":
                self.stalled += self.copies.wait(issued + self.stalled, values[0])
            elif i.opcode.startswith("dma."):
                self.copies.start(issued + self.stalled, i.opcode, *values)
            elif i.opcode in ("vdelay", "sdelay"):
                self.stalled += values[0]
            elif i.opcode == "sst":
                self.memory[values[0]] = values[1]
            elif i.opcode.startswith("sdivrem"):
                self.divided[i.name] = i.function(*values)
            elif i.target is not None:
                writes.append((i.target, self._value(i, values)))
        for target, value in writes:
            registers[target] = value
        return jump

    def _value(self, instruction: ScalarInstruction, values: list[int]) -> int:
        if instruction.opcode == "spop.drf":  # the quotient first, then the remainder
            return self.divided[instruction.sources[0]].pop(0)
        if instruction.opcode != "sld":
            return instruction.function(*values)
        if values[0] not in self.memory and self.chip.cores == 1:
            self.unknown.add("scalar memory that the program does not write")
        return self.memory.get(values[0], 0)


def simulate(
    bundles_text: str, utilization_text: str = "", chip: Chip = CHIPS["v5e"], max_segments: int = 2_000_000
) -> KernelSchedule:
    """Return the schedule of a kernel.

    Args:
        bundles_text: its `packed-bundles-post-ra` dump.
        utilization_text: its `pre-delay_hlo-static-per-bundle-utilization` dump, if there is one.
    """
    bundles = parse_bundles(bundles_text)
    capacities, rows = parse_utilization(utilization_text)
    core = _Core(bundles, chip)
    complete = not core.unknown and core.run(max_segments)
    used, empty = [0] * len(capacities), 0
    for start, times in core.visits.items():
        segment = core.segments[start]
        empty += times * sum(not bundle for bundle in bundles[segment.start : segment.end])
        for row in rows[segment.start : segment.end]:
            used = [total + times * count for total, count in zip(used, row, strict=True)]
    totals = dict(zip(capacities, used, strict=True))
    cycles = max(core.issued + core.stalled, core.copies.free)
    return KernelSchedule(
        bundles=len(bundles),
        cycles=cycles,
        issued=core.issued,
        empty=empty,
        stalled=core.stalled,
        read=core.copies.read,
        written=core.copies.written,
        busy={unit: total / (capacities[unit] * max(cycles, 1)) for unit, total in totals.items()},
        spills=totals.get("SPILL", 0),
        fills=totals.get("FILL", 0),
        unknown=tuple(sorted(core.unknown)),
        complete=complete,
        chip=chip,
    )
