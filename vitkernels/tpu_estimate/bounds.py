"""Determine what bounds an operation's time: a unit, the memory or waiting."""

from vitkernels.tpu_estimate.simulate import KernelSchedule

_NAMES = {
    "MXU": "MXU (matrix units)",
    "XLU": "XLU (transposes, reductions across lanes)",
    "VALU": "VALU (vector arithmetic)",
    "EUP": "EUP (exp, tanh, reciprocal)",
    "VLOAD": "VMEM loads",
    "VSTORE": "VMEM stores",
    "SALU": "scalar unit",
    "VPOP": "results of the matrix units and XLU",
    "FILL": "register fills",
    "SPILL": "register spills",
}
FULL = 0.7  # a unit or memory that is busy for this share of the time bounds the operation


def shares(schedule: KernelSchedule) -> dict[str, float]:
    """Return, as shares of the operation's time: HBM, each unit, waits for copies, and bundles that issue nothing."""
    cycles = max(schedule.cycles, 1)
    found = {"HBM": schedule.memory_ms / schedule.estimate_ms if schedule.cycles else 0.0}
    found |= {name: share for name, share in schedule.busy.items() if name not in ("FILL", "SPILL")}
    return found | {"copy waits": schedule.stalled / cycles, "empty bundles": schedule.empty / cycles}


def binding(schedule: KernelSchedule | None) -> str:
    """Return the short name of what bounds the operation: HBM, a unit, "copy waits", "empty bundles", or "unknown".

    A resource that is busy for at least `FULL` of the time bounds it. If none is, the larger kind of waiting does if it
    takes a fifth of the time: for copies that have not landed, or for results of earlier instructions.
    """
    if schedule is None or not schedule.cycles:
        return "unknown"
    found = shares(schedule)
    waits = {name: found.pop(name) for name in ("copy waits", "empty bundles")}
    resource, waiting = max(found, key=lambda name: found[name]), max(waits, key=lambda name: waits[name])
    return resource if found[resource] >= FULL or waits[waiting] < 0.2 else waiting


def sentence(schedule: KernelSchedule) -> str:
    """Return a sentence: what bounds the operation, for which share of its time, and what to do about it."""
    name, found = binding(schedule), shares(schedule)
    if name == "unknown":
        return "unknown: the schedule cannot be read"
    percent = f"{found[name]:.0%} of the time"
    if name == "HBM":
        return f"HBM, busy for {percent}: move fewer bytes, or fuse the neighbors"
    if name == "copy waits":
        return f"waits for copies that have not landed, {percent}: larger blocks, or fewer grid steps"
    if name == "empty bundles":
        return f"latency, {percent}: bundles wait for earlier results; give the scheduler independent work"
    return f"{_NAMES.get(name, name)}, busy for {percent}"
