"""Report the estimate of a training step: the cost of each kernel, what dominates, and whether it fits into HBM."""

import re
import tempfile
import textwrap
from pathlib import Path

from vitkernels.tpu_estimate.chips import Chip
from vitkernels.tpu_estimate.compile_process import compile_in
from vitkernels.tpu_estimate.estimate import OperationEstimate, ProgramEstimate, estimate_program
from vitkernels.tpu_estimate.report import caveat, summary
from vitkernels.tpu_estimate.validate import PUBLISHED

_COPIES = ("copy", "copy-done", "slice-done", "slice", "transpose", "reshape", "concatenate", "bitcast-convert")
# libtpu replaces a plain softmax(q kᵀ) v by its own flash attention, under this name.
_XLA_FLASH = re.compile(r"name(\.\d+)?")


def estimate(overrides: list[str], chip: Chip, timeout: float = 3600) -> ProgramEstimate:
    """Record, compile and estimate the step of `python train.py *overrides`; raise UsageError if any of these fails."""
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        build = "vitkernels.tpu_estimate.record_step:build"
        return estimate_program(compile_in(Path(folder), build, chip.name, *overrides, chip=chip.name, timeout=timeout))


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
        "source": one.source,
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


_HEAD = (
    "| kernel | torch op | part | runs | ESTIMATE ms in total | each | compute | HBM | HBM MiB | MXU | bundles × trips "
    "| spills | VMEM MiB |"
)


def kernel_table(rows: list[dict], limit: int = 20) -> str:
    """Return the longest kernels as Markdown, each with its torch operation (of a fusion, the root's)."""
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for row in rows[:limit]:
        cells = [row["kernel"], _torch_op(row["source"]), row["part"], str(row["times_run"])]
        cells += [f"{row['estimate_ms_in_all']:.2f}", f"{row['estimate_ms']:.3f}"]
        if "bundles" in row:
            cells += [f"{row[key]:.3f}" for key in ("estimate_compute_ms", "estimate_memory_ms")]
            cells.append(f"{row['hbm_traffic_bytes'] / 2**20:.1f}")
            cells += [f"{row['mxu_share']:.0%}", f"{row['scheduled_bundles']}", f"{row['spilled_registers']}"]
        else:
            cells += ["–"] * 6
        cells.append("–" if row["vmem_bytes"] is None else f"{row['vmem_bytes'] / 2**20:.1f}")
        lines.append("| " + " | ".join(cells) + " |")
    if (rest := rows[limit:]) != []:
        lines.append(f"| {len(rest)} more | | | | {sum(row['estimate_ms_in_all'] for row in rest):.2f} |" + " |" * 8)
    return "\n".join(lines)


def step_table(steps: dict[str, dict], chip: Chip) -> str:
    """Return a table that compares steps; the speedup is relative to the slowest."""
    head = (
        "| attn | ESTIMATE ms | images/s | MFU | speedup | dominated by | HBM GiB of "
        + f"{chip.hbm_bytes >> 30} | fits |"
    )
    lines = [head, "|---" * (head.count("|") - 1) + "|"]
    slowest = max((row["estimate_ms"] for row in steps.values() if "error" not in row), default=0.0)
    for name, row in steps.items():
        if "error" in row:
            lines.append(f"| {name} | {row['error'].strip().splitlines()[-1][:200]} |")
            continue
        first = [f"{part} {_short(ms)}" for part, ms in list(row["estimate_ms_of_parts"].items())[:3]]
        mfu = "–" if row["estimate_mfu"] is None else f"{row['estimate_mfu']:.0%}"
        cells = [name, _short(row["estimate_ms"]), f"{row['estimate_images_per_s']:.0f}", mfu]
        cells += [f"{slowest / row['estimate_ms']:.2f}", ", ".join(first), f"{row['hbm_size_bytes'] / 2**30:.2f}"]
        lines.append("| " + " | ".join([*cells, "yes" if row["fits_in_hbm"] else "NO"]) + " |")
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


def picture(steps: dict[str, dict], title: str, chip: Chip, path: Path) -> None:
    """Write a chart: a stacked bar of the step's parts per attention backend, and the validation to the right."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5 + 0.4 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    bars, ratios = figure.subplots(1, 2, width_ratios=(3, 1))
    _bars(bars, {name: row for name, row in steps.items() if "error" not in row})
    for name in (name for name, row in steps.items() if "error" in row):
        bars.barh(name, 0)
        bars.text(0, name, " does not compile, see the table", va="center")
    bars.invert_yaxis()
    bars.set_title(title)
    _ratios(ratios)
    figure.legend(loc="outside upper center", ncols=5, frameon=False)
    figure.supxlabel(textwrap.fill(caveat(chip), 190), fontsize=8)
    figure.savefig(path, dpi=130)


def _bars(axes, good: dict[str, dict]) -> None:
    totals: dict[str, float] = {}
    for row in good.values():
        for part_name, ms in row["estimate_ms_of_parts"].items():
            totals[part_name] = totals.get(part_name, 0.0) + ms
    left = dict.fromkeys(good, 0.0)
    for part_name in sorted(totals, key=lambda name: -totals[name]):
        widths = [row["estimate_ms_of_parts"].get(part_name, 0.0) for row in good.values()]
        axes.barh(list(good), widths, left=list(left.values()), label=part_name, height=0.6)
        left = {name: left[name] + width for name, width in zip(good, widths, strict=True)}
    for name, end in left.items():
        fits = "" if good[name]["fits_in_hbm"] else "\n over HBM"
        axes.text(end, name, f" {_short(end)} ms{fits}", va="center")
    axes.set_xlim(0, 1.12 * max(left.values(), default=1.0))
    axes.set_xlabel("ESTIMATED ms per training step (from the compiler's schedule; no TPU was used)")


def _ratios(axes) -> None:
    names = [case.what for case in PUBLISHED]
    axes.axvline(1, color="grey", linewidth=1)
    axes.scatter([case.ratio for case in PUBLISHED], range(len(names)), s=18, color="black")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0.8, 1.2)
    axes.set_xlabel("estimate / published")
    axes.set_title("Validation: timings published for TPU v5e", fontsize=10)
