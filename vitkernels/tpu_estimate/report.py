"""The attention report: estimated rows as dictionaries (for JSON), as a table, and the validation beside them."""

import json
from datetime import date
from importlib.metadata import version
from pathlib import Path

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import attention
from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.program import Operation, Program
from vitkernels.tpu_estimate.validate import CASES, CAVEAT


def row(contender: str, which: str, shape: tuple[int, int, int, int], chip: Chip = CHIPS["v5e"]) -> dict:
    """One contender's pass; where it does not compile, the reason as `error`. Every time in it is an estimate."""
    named = {"shape_BHND": list(shape), "dtype": "bfloat16", "chip": chip.name, "contender": contender, "pass": which}
    try:
        program = attention.estimate(contender, which, shape, chip)
    except UsageError as error:
        return named | {"error": str(error)}
    return named | summary(program) | {"operations": [_operation(operation) for operation in program.operations]}


def append(found: dict, path: Path) -> None:
    """A row, with what it was estimated with and without its operations, as a line of a results file."""
    versions = {name: version(name) for name in ("jax", "libtpu")}
    label = {"label": "ESTIMATE, no TPU was used", "date": date.today().isoformat(), **versions}
    with path.open("a") as file:
        file.write(json.dumps(label | {key: x for key, x in found.items() if key != "operations"}) + "\n")


def summary(program: Program) -> dict:
    """Milliseconds and bytes of a whole program."""
    schedules = [(o.schedule, o.vmem or 0) for o in program.operations if o.schedule]
    cycles = sum(schedule.cycles for schedule, _ in schedules)
    busy = sum(schedule.busy.get("MXU", 0.0) * schedule.cycles for schedule, _ in schedules)
    return {
        "estimate_ms": program.estimate_ms,
        "estimate_compute_ms": program.compute_ms,
        "estimate_memory_ms": program.memory_ms,
        "estimate_mxu_share": busy / cycles if cycles else 0.0,
        "scheduled_bundles": sum(schedule.issued for schedule, _ in schedules),
        "spilled_registers": sum(schedule.spills for schedule, _ in schedules),
        "hbm_traffic_bytes": program.hbm_bytes,
        "vmem_bytes": max((vmem for _, vmem in schedules), default=0),
        "hbm_size_bytes": sum(program.memory.get(part, 0) for part in ("argument", "output", "temp")),
        "untimed": program.untimed,
        "note": program.note,
    }


def _operation(operation: Operation) -> dict:
    found = {
        "name": operation.name,
        "kind": operation.kind,
        "source": operation.source,
        "estimate_ms": operation.estimate_ms,
        "estimate_of_xla_ms": operation.xla_ms,
        "vmem_bytes": operation.vmem,
    }
    if (schedule := operation.schedule) is not None:
        found |= {
            "estimate_compute_ms": schedule.compute_ms,
            "estimate_memory_ms": schedule.memory_ms,
            "bundles": schedule.bundles,
            "scheduled_bundles": schedule.issued,
            "empty_bundles": schedule.empty,
            "stalled_cycles": schedule.stalled,
            "read_bytes": schedule.read,
            "written_bytes": schedule.written,
            "busy": schedule.busy,
            "spilled_registers": schedule.spills,
            "filled_registers": schedule.fills,
            "not_interpreted": list(schedule.unknown),
        }
    return found


_COLUMNS = ("pass", "contender", "ESTIMATE ms", "compute ms", "HBM ms", "MXU", "spills", "VMEM MiB", "HBM MiB", "ratio")


def table(rows: list[dict]) -> str:
    """Rows of one shape as Markdown. Ratio: an estimate over that of the first contender in the same pass."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    first: dict[str, float] = {}
    for found in rows:
        cells = [found["pass"], found["contender"]]
        if "error" in found:
            lines.append("| " + " | ".join(cells) + f" | {found['error'].splitlines()[-1][:150]} |")
            continue
        base = first.setdefault(found["pass"], found["estimate_ms"])
        cells += [f"{found[key]:.3f}" for key in ("estimate_ms", "estimate_compute_ms", "estimate_memory_ms")]
        cells += [f"{found['estimate_mxu_share']:.0%}", str(found["spilled_registers"])]
        cells += [f"{found[key] / 2**20:.1f}" for key in ("vmem_bytes", "hbm_size_bytes")]
        cells.append(f"{found['estimate_ms'] / base:.2f} ×" if base else "–")
        lines.append("| " + " | ".join(cells) + " |")
        if found["note"]:
            lines.append(f"| | {found['note']} |")
        if found["untimed"]:
            lines.append(f"| | not read from a schedule: {', '.join(found['untimed'])} |")
    return "\n".join(lines)


def against_the_best(rows: list[dict]) -> str:
    """How many times as fast as the best of the others the first contender is, pass by pass; rows of one shape."""
    parts = []
    for which in dict.fromkeys(found["pass"] for found in rows):
        first, *others = [found for found in rows if found["pass"] == which]
        others = [found for found in others if "error" not in found]
        if "error" not in first and others:
            best = min(others, key=lambda found: found["estimate_ms"])
            parts.append(f"{which} {best['estimate_ms'] / first['estimate_ms']:.2f} × ({best['contender']})")
    return f"ESTIMATED, {rows[0]['contender']} against the best of the others: {', '.join(parts) or 'there is none'}"


def operations_table(found: dict) -> str:
    """The operations of one row that take time, longest first."""
    lines = ["| operation | kind | ESTIMATE ms | XLA's own ms | compute ms | HBM ms |", "|---" * 6 + "|"]
    for operation in sorted(found.get("operations", ()), key=lambda o: -o["estimate_ms"]):
        times = [operation["estimate_ms"], operation["estimate_of_xla_ms"]]
        times += [operation.get(key) for key in ("estimate_compute_ms", "estimate_memory_ms")]
        cells = ["–" if time is None else f"{time:.4f}" for time in times]
        lines.append("| " + " | ".join([operation["name"], operation["kind"], *cells]) + " |")
    return "\n".join(lines)


def caveat(chip: Chip) -> str:
    """How far an estimate for the chip can be trusted."""
    text = CAVEAT.replace("v5e; no TPU", f"{chip.name}; no TPU")
    if chip.validated:
        return text
    return f"{text} NOT VALIDATED for {chip.name}: published timings are v5e's, its clock and bandwidth data sheets'."


def validation(chip: Chip = CHIPS["v5e"]) -> str:
    """The caveat, and the method's estimates beside what others measured on a real v5e."""
    lines = [caveat(chip), "", "| case (TPU v5e) | estimate ms | published ms | ratio |", "|---|---|---|---|"]
    lines += [f"| {c.what} | {c.recorded_ms:g} | {c.published_ms:g} | {c.ratio:.2f} |" for c in CASES]
    return "\n".join(lines)


def document(rows: list[dict], chip: Chip = CHIPS["v5e"]) -> dict:
    """Everything, for JSON."""
    cases = [{"case": c.what, "estimate_ms": c.recorded_ms, "published_ms": c.published_ms} for c in CASES]
    return {"label": "ESTIMATE", "chip": chip.name, "caveat": caveat(chip), "validation": cases, "rows": rows}
