"""The report on a whole training step: what each kernel costs, what dominates, and whether it fits. All estimates."""

import re
import tempfile
import textwrap
from pathlib import Path

from vitkernels.tpu_estimate import dump as tpu_dump
from vitkernels.tpu_estimate import program as tpu_program
from vitkernels.tpu_estimate import validate
from vitkernels.tpu_estimate.chips import Chip
from vitkernels.tpu_estimate.program import Operation, Program
from vitkernels.tpu_estimate.report import caveat, summary

_COPIES = ("copy", "copy-done", "slice-done", "slice", "transpose", "reshape", "concatenate", "bitcast-convert")
# libtpu puts a flash attention of its own, which it calls so, in place of a plain softmax(q kᵀ) v.
_XLA_FLASH = re.compile(r"name(\.\d+)?")


def estimate(overrides: list[str], chip: Chip, timeout: float = 3600) -> Program:
    """Record, compile and estimate the step of `python train.py *overrides`; raises UsageError where that fails."""
    with tempfile.TemporaryDirectory(prefix="vitkernels_tpu_") as folder:
        build = "vitkernels.tpu_estimate.record_step:build"
        dump = tpu_dump.compile_in(Path(folder), build, chip.name, *overrides, chip=chip.name, timeout=timeout)
        return tpu_program.estimate(dump)


def part(operation: Operation) -> str:
    """Which part of the step an operation belongs to. XLA's fusions are named after the operation at their root."""
    torch_op = _torch_op(operation.source)
    if operation.kind == "tpu_custom_call":
        return "attention kernel of XLA's own" if _XLA_FLASH.fullmatch(operation.name) else "Pallas kernels"
    if operation.kind in _COPIES:
        return "copies"
    if "/torch/optim/" in operation.file or "/clip_grad" in operation.file:
        return "optimizer"
    # The matmul of two activations is attention's; a linear layer's is mm or addmm.
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


def step(program: Program, batch: int, flops: float | None) -> dict:
    """The whole step: milliseconds, what dominates, memory. flops: of the model, forward and backward."""
    parts: dict[str, float] = {}
    for operation in program.operations:
        parts[part(operation)] = parts.get(part(operation), 0.0) + operation.estimate_ms
    memory, chip = program.memory, program.chip
    # What is aliased is counted as argument and as output, and is there once.
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


def kernels(program: Program) -> list[dict]:
    """One row per distinct kernel, longest first in all; figures of one run, except `estimate_ms_in_all`."""
    same: dict[str, list[Operation]] = {}
    for operation in program.operations:
        same.setdefault(operation.kernel, []).append(operation)
    rows = [_kernel(found) for found in same.values()]
    return sorted(rows, key=lambda row: -row["estimate_ms_in_all"])


def _kernel(same: list[Operation]) -> dict:
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
            "scheduled_bundles": schedule.issued,  # bundles times the trips of the loops they are in
            "mxu_share": schedule.busy.get("MXU", 0.0),
            "hbm_traffic_bytes": schedule.read + schedule.written,
            "estimate_compute_ms": schedule.compute_ms,
            "estimate_memory_ms": schedule.memory_ms,
            "spilled_registers": schedule.spills,
        }
    return row


_HEAD = (
    "| kernel | of | part | × | ESTIMATE ms in all | each | compute | HBM | HBM MiB | MXU | bundles × trips | spills "
    "| VMEM MiB |"
)


def kernel_table(rows: list[dict], most: int = 20) -> str:
    """The longest kernels as Markdown, with the torch operation that each comes from (a fusion's: that at its root)."""
    lines = [_HEAD, "|---" * (_HEAD.count("|") - 1) + "|"]
    for row in rows[:most]:
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
    if (rest := rows[most:]) != []:
        lines.append(f"| {len(rest)} more | | | | {sum(row['estimate_ms_in_all'] for row in rest):.2f} |" + " |" * 8)
    return "\n".join(lines)


def step_table(steps: dict[str, dict], chip: Chip) -> str:
    """Steps side by side; how many times as fast as the slowest."""
    head = (
        "| attn | ESTIMATE ms | images/s | MFU | × as fast | dominated by | HBM GiB of "
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
    """What the estimate of a step leaves out, in a sentence."""
    names = sorted({name.split(".")[0] for name in row["untimed"]})
    if not names:
        return "Every operation's schedule was read."
    return (
        f"{len(row['untimed'])} operations without a readable schedule ({', '.join(names)}): taken at XLA's own "
        f"estimate, {row['estimate_ms_of_untimed']:.2f} ms in all, or at nothing where it has none (scalars). What it "
        "takes to go from one operation to the next is not counted either."
    )


def picture(steps: dict[str, dict], title: str, chip: Chip, path: Path) -> None:
    """Stacked bars, one per attention backend, of what the step's estimate is made of; beside them the validation."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5 + 0.4 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    bars, ratios = figure.subplots(1, 2, width_ratios=(3, 1))
    _bars(bars, {name: row for name, row in steps.items() if "error" not in row})
    for name in (name for name, row in steps.items() if "error" in row):
        bars.barh(name, 0)
        bars.text(0, name, " does not compile: see the table", va="center")
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
    names = [case.what for case in validate.CASES]
    axes.axvline(1, color="grey", linewidth=1)
    axes.scatter([case.ratio for case in validate.CASES], range(len(names)), s=18, color="black")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0.8, 1.2)
    axes.set_xlabel("estimate / published")
    axes.set_title("Validation: timings published for TPU v5e", fontsize=10)
