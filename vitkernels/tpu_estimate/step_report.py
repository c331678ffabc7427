"""Report the estimate of a training step: every operation, the longest kernels, and whether the step fits into HBM."""

import re
import tempfile
from pathlib import Path
from typing import Any

from vitkernels.tpu_estimate import bounds
from vitkernels.tpu_estimate.chips import CHIPS, Chip
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import OperationEstimate, ProgramEstimate, estimate_program
from vitkernels.tpu_estimate.report import caveat, summary

_WAITS = ("copy-done", "slice-done")  # for copies that XLA started earlier
_COPIES = ("copy", "copy-done", "slice-done", "slice", "transpose", "reshape", "concatenate", "bitcast-convert")
# libtpu replaces a plain softmax(q kᵀ) v by its own flash attention, under this name.
_XLA_FLASH = re.compile(r"name(\.\d+)?")


def estimate(overrides: list[str], chip: Chip, timeout: float = 3600) -> ProgramEstimate:
    """Record, compile and estimate the step of `python train.py *overrides`; raise UsageError if any of these fails."""
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        build = "vitkernels.tpu_estimate.record_step:build"
        return estimate_program(compile_in(Path(folder), build, chip.name, *overrides, chip=chip.name, timeout=timeout))


def estimate_document(settings: list[str], chip: Chip) -> dict[str, Any]:
    """Return `document` of the step with these settings; raise UsageError if it cannot be estimated."""
    from vitkernels.tpu_estimate import record_step

    cfg = record_step.compose(tuple(settings))
    batch, facts = cfg.data.batch_size * cfg.trainer.accum_steps, record_step.model_facts(cfg)
    found = document(estimate(settings, chip), settings, batch, facts.train_flops_per_image * batch)
    return found | {"parameters": facts.parameters}


def part(operation: OperationEstimate) -> str:
    """Return the part of the step that an operation belongs to; a fusion is classified by its root operation."""
    torch_op = _torch_op(operation.source)
    if operation.kind == "tpu_custom_call":
        return "XLA's own attention kernel" if _XLA_FLASH.fullmatch(operation.name) else "Pallas kernels"
    if operation.kind in _COPIES:
        return "copies"
    if "/torch/optim/" in operation.file or "/clip_grad" in operation.file:
        return "optimizer"
    # A matmul of two activations belongs to attention; linear layers use mm or addmm.
    if "/vitkernels/attention/" in operation.file or "softmax" in torch_op or torch_op in ("aten__matmul", "aten__bmm"):
        return "attention in XLA"
    if operation.schedule is not None and operation.schedule.busy.get("MXU", 0.0) > 0.05:
        return "matrix products"
    if torch_op in ("aten__permute", "aten__stack", "aten__view", "aten__transpose"):
        return "copies"
    if "batch_norm" in torch_op or "layer_norm" in torch_op:
        return "LayerNorm"
    return "elementwise, sums"


def _torch_op(source: str) -> str:
    return source.split("/")[0].split(".")[0]


def step(program: ProgramEstimate, batch: int, flops: float | None) -> dict:
    """Return the figures of a step: times in ms, the share of each part, memory.

    flops: model FLOPs of the step, forward and backward; None if unknown.
    """
    parts: dict[str, float] = {}
    for operation in program.operations:
        parts[part(operation)] = parts.get(part(operation), 0.0) + operation.estimate_ms
    memory, chip = program.memory, program.chip
    # Aliased memory is counted as argument and as output, but exists once.
    need = sum(memory[name] for name in ("argument", "output", "temp", "generated_code")) - memory["alias"]
    ms, untimed = program.estimate_ms, set(program.untimed)
    return summary(program) | {
        "estimate_ms_of_untimed": sum(o.estimate_ms for o in program.operations if o.name in untimed),
        "estimate_images_per_s": batch / ms * 1e3,
        "estimate_mfu": None if flops is None else flops / (ms / 1e3 * chip.peak_flops),
        "hbm_size_bytes": need,
        "fits_in_hbm": need <= chip.hbm_bytes,
        "estimate_ms_of_parts": dict(sorted(parts.items(), key=lambda item: -item[1])),
    }


def document(program: ProgramEstimate, settings: list[str], batch: int, flops: float | None) -> dict[str, Any]:
    """Return everything about a step, for JSON: its figures, a row per kernel, and a row per operation."""
    return {
        "label": "ESTIMATE, no TPU was used",
        "chip": program.chip.name,
        "settings": settings,
        "batch": batch,
        "caveat": caveat(program.chip),
        "step": step(program, batch, flops),
        "kernels": kernels(program),
        "operations": operations(program),
    }


def operations(program: ProgramEstimate) -> list[dict]:
    """Return a row per operation, in the order of execution; an operation starts when the one before it has ended.

    mxu_share and hbm_share are shares of the operation's time; None without a readable schedule.
    """
    rows, start = [], 0.0
    for operation in program.operations:
        schedule = operation.schedule
        row = {
            "name": operation.name,
            "kernel": operation.kernel,
            "op": _torch_op(operation.source),
            "part": part(operation),
            "result": operation.result,
            "start_ms": start,
            "estimate_ms": operation.estimate_ms,
            "bound_by": "HBM" if operation.kind in _WAITS else bounds.binding(schedule),
            "vmem_bytes": operation.vmem,
        }
        keys = ("read_bytes", "written_bytes", "mxu_share", "hbm_share")
        row |= dict.fromkeys(keys)
        if schedule is not None:
            row |= {"read_bytes": schedule.read, "written_bytes": schedule.written}
            found = bounds.shares(schedule)
            row |= {"mxu_share": found.get("MXU", 0.0), "hbm_share": found["HBM"]}
        rows.append(row)
        start += operation.estimate_ms
    return rows


def kernels(program: ProgramEstimate) -> list[dict]:
    """Return a row per distinct kernel, by descending total time.

    Figures are those of one execution, except `estimate_ms_in_all`.
    """
    same: dict[str, list[OperationEstimate]] = {}
    for operation in program.operations:
        same.setdefault(operation.kernel, []).append(operation)
    rows = [_kernel(found) for found in same.values()]
    return sorted(rows, key=lambda row: -row["estimate_ms_in_all"])


def _kernel(same: list[OperationEstimate]) -> dict:
    one, schedule = same[0], same[0].schedule
    row = {
        "kernel": one.kernel,
        "part": part(one),
        "op": _torch_op(one.source),
        "result": one.result,
        "source": one.source,
        "bound_by": "HBM" if one.kind in _WAITS else bounds.binding(schedule),
        "times_run": len(same),
        "estimate_ms": one.estimate_ms,
        "estimate_ms_in_all": sum(operation.estimate_ms for operation in same),
        "estimate_of_xla_ms": one.xla_ms,
        "vmem_bytes": one.vmem,
    }
    if schedule is not None:
        row |= {
            "bundles": schedule.bundles,
            "scheduled_bundles": schedule.issued,  # bundles times the trip counts of their loops
            "mxu_share": schedule.busy.get("MXU", 0.0),
            "hbm_traffic_bytes": schedule.read + schedule.written,
            "estimate_compute_ms": schedule.compute_ms,
            "estimate_memory_ms": schedule.memory_ms,
            "spilled_registers": schedule.spills,
        }
    return row


def text(found: dict, top: int = 25) -> str:
    """Return the figures of a step as text for the terminal: the step, its parts, and its longest kernels (0: all)."""
    row, chip = found["step"], CHIPS[found["chip"]]
    mfu = "unknown" if row["estimate_mfu"] is None else f"{row['estimate_mfu']:.0%}"
    fits = "fits" if row["fits_in_hbm"] else "DOES NOT FIT"
    lines = [
        f"ESTIMATE for TPU {chip.name}, from the compiler's schedule (no TPU was used): {' '.join(found['settings'])}",
        f"  step     {_short(row['estimate_ms'])} ms, {row['estimate_images_per_s']:.0f} images/s, MFU {mfu}",
        f"  memory   {row['hbm_size_bytes'] / 2**30:.2f} of {chip.hbm_bytes >> 30} GiB: {fits}",
        f"  traffic  {row['hbm_traffic_bytes'] / 2**30:.1f} GiB: {_short(row['estimate_memory_ms'])} ms of HBM",
        "",
        parts_table(found["operations"]),
        "",
        kernel_table(found["kernels"], top),
        "",
        untimed(row),
    ]
    return "\n".join(lines)


def parts_table(rows: list[dict]) -> str:
    """Return the parts of a step as Markdown, longest first: time, share, bytes, MXU, and what bounds them."""
    head = "| part | ESTIMATE ms | share | operations | HBM GiB | MXU | bound by (ms) |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    total = sum(row["estimate_ms"] for row in rows)
    by_part: dict[str, list[dict]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append(row)
    for name, found in sorted(by_part.items(), key=lambda item: -_ms(item[1])):
        ms, traffic = _ms(found), sum((row["read_bytes"] or 0) + (row["written_bytes"] or 0) for row in found)
        busy = sum((row["mxu_share"] or 0.0) * row["estimate_ms"] for row in found)
        bound: dict[str, float] = {}
        for row in found:
            bound[row["bound_by"]] = bound.get(row["bound_by"], 0.0) + row["estimate_ms"]
        first = sorted(bound.items(), key=lambda item: -item[1])[:3]
        cells = [name, _short(ms), f"{ms / total:.0%}", str(len(found)), f"{traffic / 2**30:.1f}"]
        cells += [f"{busy / ms:.0%}" if ms else "–", ", ".join(f"{what} {_short(x)}" for what, x in first if x)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ms(rows: list[dict]) -> float:
    return sum(row["estimate_ms"] for row in rows)


_HEAD = "| kernel | op | part | runs | ESTIMATE ms in total | each | HBM MiB | MXU | bound by | VMEM MiB | spills |"


def kernel_table(rows: list[dict], limit: int = 25) -> str:
    """Return the longest kernels as Markdown, each with its torch operation (of a fusion, the root's); 0 for all."""
    shown, rest = (rows[:limit], rows[limit:]) if limit else (rows, [])
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for row in shown:
        cells = [row["kernel"], row["op"], row["part"], str(row["times_run"])]
        cells += [f"{row['estimate_ms_in_all']:.2f}", f"{row['estimate_ms']:.3f}"]
        has_schedule = "bundles" in row
        cells += [f"{row['hbm_traffic_bytes'] / 2**20:.1f}" if has_schedule else "–"]
        cells += [f"{row['mxu_share']:.0%}" if has_schedule else "–", row["bound_by"]]
        cells.append("–" if row["vmem_bytes"] is None else f"{row['vmem_bytes'] / 2**20:.1f}")
        cells.append(str(row["spilled_registers"]) if has_schedule else "–")
        lines.append("| " + " | ".join(cells) + " |")
    if rest:
        lines.append(f"| {len(rest)} more | | | | {sum(row['estimate_ms_in_all'] for row in rest):.2f} |" + " |" * 6)
    return "\n".join(lines)


def operation_table(rows: list[dict]) -> str:
    """Return every operation as Markdown, in the order of execution."""
    head = "| start ms | operation | op | part | ESTIMATE ms | HBM MiB | MXU | bound by |"
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    for row in rows:
        traffic = None if row["read_bytes"] is None else (row["read_bytes"] + row["written_bytes"]) / 2**20
        cells = [f"{row['start_ms']:.3f}", row["name"], row["op"], row["part"], f"{row['estimate_ms']:.4f}"]
        cells += ["–" if traffic is None else f"{traffic:.1f}"]
        cells += ["–" if row["mxu_share"] is None else f"{row['mxu_share']:.0%}", row["bound_by"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _short(ms: float) -> str:
    return f"{ms:.1f}" if ms >= 10 else f"{ms:.3f}"


def untimed(row: dict) -> str:
    """Return a sentence about the operations that the estimate of a step omits."""
    names = sorted({name.split(".")[0] for name in row["untimed"]})
    if not names:
        return "The schedules of all operations were read."
    return (
        f"{len(row['untimed'])} operations have no readable schedule ({', '.join(names)}) and are counted at XLA's own "
        f"estimate, {row['estimate_ms_of_untimed']:.2f} ms in total, or as free if XLA has none (scalars). The gaps "
        "between operations are not counted."
    )
