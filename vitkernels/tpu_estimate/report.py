"""Report estimates of attention: rows as dictionaries (for JSON) and as tables, together with the validation."""

import json
from collections.abc import Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate import attention_contenders
from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.estimate import OperationEstimate, ProgramEstimate
from vitkernels.tpu_estimate.validate import CAVEAT, NOT_COMPARED, PUBLISHED, reestimate


def row(contender: str, pass_name: str, shape: tuple[int, int, int, int], chip: Chip = CHIPS["v5e"]) -> dict:
    """Return the estimate of one pass of a contender; if it does not compile, `error` holds the reason."""
    identity = {"shape_BHND": list(shape), "dtype": "bfloat16", "chip": chip.name, "contender": contender}
    identity["pass"] = pass_name
    try:
        program = attention_contenders.estimate(contender, pass_name, shape, chip)
    except UsageError as error:
        return identity | {"error": str(error)}
    return identity | summary(program) | {"operations": [_operation(operation) for operation in program.operations]}


def append(found: dict, path: Path) -> None:
    """Append a row to a results file, with the date and versions but without its operations."""
    versions = {name: version(name) for name in ("jax", "libtpu")}
    label = {"label": "ESTIMATE, no TPU was used", "date": date.today().isoformat(), **versions}
    with path.open("a") as file:
        file.write(json.dumps(label | {key: x for key, x in found.items() if key != "operations"}) + "\n")


def summary(program: ProgramEstimate) -> dict:
    """Return the times (ms) and sizes (bytes) of a program."""
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


def _operation(operation: OperationEstimate) -> dict:
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
    """Return the rows of one shape as Markdown.

    The ratio is an estimate divided by that of the first contender in the same pass.
    """
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
            lines.append(f"| | no readable schedule: {', '.join(found['untimed'])} |")
    return "\n".join(lines)


def speedup_over_best(rows: list[dict]) -> str:
    """Return the speedup of the first contender over the best other one, per pass; rows of one shape."""
    parts = []
    for pass_name in dict.fromkeys(found["pass"] for found in rows):
        first, *others = [found for found in rows if found["pass"] == pass_name]
        others = [found for found in others if "error" not in found]
        if "error" not in first and others:
            best = min(others, key=lambda found: found["estimate_ms"])
            parts.append(f"{pass_name} {best['estimate_ms'] / first['estimate_ms']:.2f} × ({best['contender']})")
    return f"ESTIMATED speedup of {rows[0]['contender']} over the best other contender: {', '.join(parts) or 'none'}"


def operations_table(found: dict) -> str:
    """Return a table of a row's operations, longest first."""
    lines = ["| operation | kind | ESTIMATE ms | XLA's own ms | compute ms | HBM ms |", "|---" * 6 + "|"]
    for operation in sorted(found.get("operations", ()), key=lambda o: -o["estimate_ms"]):
        times = [operation["estimate_ms"], operation["estimate_of_xla_ms"]]
        times += [operation.get(key) for key in ("estimate_compute_ms", "estimate_memory_ms")]
        cells = ["–" if time is None else f"{time:.4f}" for time in times]
        lines.append("| " + " | ".join([operation["name"], operation["kind"], *cells]) + " |")
    return "\n".join(lines)


def caveat(chip: Chip) -> str:
    """Return how far an estimate for the chip can be trusted."""
    text = CAVEAT.replace("v5e; no TPU", f"{chip.name}; no TPU")
    if chip.validated:
        return text
    return f"{text} NOT VALIDATED for {chip.name}: clock and bandwidth are those of its data sheet; {trust(chip)}"


def trust(chip: Chip) -> str:
    """Return in one line how far an estimate for the chip can be trusted."""
    fitted = [case.ratio for case in PUBLISHED if case.fitted]
    others = [case.ratio for case in PUBLISHED if case.chip == chip.name and not case.fitted]
    text = (
        f"Estimate / published: {min(fitted):.2f} to {max(fitted):.2f} for the {len(fitted)} timings of v5e that two "
        "constants were fitted to"
    )
    if others:
        return f"{text}, {min(others):.2f} to {max(others):.2f} for {len(others)} others of {chip.name}."
    return f"{text}. NOT VALIDATED for {chip.name}."


def validation(chip: Chip = CHIPS["v5e"]) -> str:
    """Return the caveat, and a table of estimates next to timings published for a real v5e."""
    lines = [caveat(chip), "", "| case | chip | estimate ms | published ms | ratio |", "|---|---|---|---|---|"]
    lines += [f"| {c.what} | {c.chip} | {c.recorded_ms:g} | {c.published_ms:g} | {c.ratio:.2f} |" for c in PUBLISHED]
    return "\n".join(lines)


def published_lines() -> Iterator[str]:
    """Yield the published timings as Markdown, each with its recorded estimate and that of this checkout."""
    columns = ("case", "chip", "recorded ms", "now ms", "published ms", "now / published", "source", "note")
    yield "ESTIMATES, no TPU was used\n\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|"
    for case in PUBLISHED:
        cells = [case.what, case.chip, f"{case.recorded_ms:g}", "–", f"{case.published_ms:g}", "–", case.source]
        cells.append(case.note)
        if case.program:
            ms = reestimate(case)
            cells[3], cells[5] = f"{ms:.3f}", f"{ms / case.published_ms:.2f}"
        yield "| " + " | ".join(cells) + " |"
    yield "\n| published, not compared | why | source |\n|---|---|---|"
    for figure, source, why in NOT_COMPARED:
        yield f"| {figure} | {why} | {source} |"
    yield f"\n{CAVEAT}"


def document(rows: list[dict], chip: Chip = CHIPS["v5e"]) -> dict:
    """Return the full report for JSON."""
    cases = [{"case": c.what, "estimate_ms": c.recorded_ms, "published_ms": c.published_ms} for c in PUBLISHED]
    return {"label": "ESTIMATE", "chip": chip.name, "caveat": caveat(chip), "validation": cases, "rows": rows}
