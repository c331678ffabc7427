"""Draw an estimated training step: its operations over time, the utilization of the chip, and the longest kernels."""

import textwrap
from pathlib import Path
from typing import Any

from vitkernels.tpu_estimate.chips import CHIPS
from vitkernels.tpu_estimate.report import trust

_COLORS = {
    "matrix products": "#2c6fad",
    "Pallas kernels": "#e1812c",
    "XLA's own attention kernel": "#b8431f",
    "attention in XLA": "#d1495b",
    "LayerNorm": "#4f9d69",
    "elementwise, sums": "#8a70b0",
    "optimizer": "#c9a227",
    "collectives": "#139a9a",
    "copies": "#9a9a9a",
}
_BINS = 500
_VISIBLE = 5e-4  # share of the step below which a part is not drawn
_INK, _FAINT = "#222222", "#d9d9d9"


def timeline(found: dict, path: Path) -> None:
    """Write the picture of a step, a document of `step_report.document`, as PNG or SVG by the name of the file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 9.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 2, height_ratios=(0.75, 1.5, 3.2), width_ratios=(1, 1.75))
    ribbon, busy = figure.add_subplot(grid[0, :]), figure.add_subplot(grid[1, :])
    _ribbon(ribbon, found["operations"])
    _busy(busy, found["operations"])
    _parts(figure.add_subplot(grid[2, 0]), found["operations"])
    _kernels(figure.add_subplot(grid[2, 1]), found["kernels"][:14])
    figure.suptitle(_title(found), x=0.01, ha="left", fontsize=15, color=_INK)
    chip = CHIPS[found["chip"]]
    figure.supxlabel(textwrap.fill(f"No TPU was used. {trust(chip)}", 170), x=0.01, ha="left", fontsize=8.5)
    figure.savefig(path, dpi=130)


def _title(found: dict) -> str:
    row = found["step"]
    mfu = "" if row["estimate_mfu"] is None else f", MFU {row['estimate_mfu']:.0%}"
    settings = textwrap.shorten(" ".join(found["settings"]), 130, placeholder=" …")
    first = f"ESTIMATED step on TPU {found['chip']}: {row['estimate_ms']:.1f} ms, "
    return f"{first}{row['estimate_images_per_s']:.0f} images/s{mfu}\n{settings}"


def _color(part: str) -> str:
    return _COLORS.get(part, "#555555")


def _bare(axes: Any, keep: str = "") -> None:
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(side in keep)
    axes.tick_params(length=0, labelsize=9, colors=_INK)


def _ribbon(axes: Any, rows: list[dict]) -> None:
    """Draw the operations in the order of execution, colored by part."""
    by_part: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        by_part.setdefault(row["part"], []).append((row["start_ms"], row["estimate_ms"]))
    for part, spans in by_part.items():
        axes.broken_barh(spans, (0, 1), color=_color(part), linewidth=0, label=part)
    axes.set_xlim(0, rows[-1]["start_ms"] + rows[-1]["estimate_ms"])
    backward = next((row["start_ms"] for row in rows if "backward" in row["op"]), None)
    if backward is not None:
        axes.axvline(backward, color=_INK, linewidth=1)
        axes.text(backward, 1.04, " backward from here", fontsize=9, color=_INK, transform=axes.get_xaxis_transform())
    axes.set_yticks([])
    axes.set_title(f"{len(rows)} operations in the order in which they run", loc="left", fontsize=10, color=_INK)
    _bare(axes)
    axes.set_xticks([])


def _busy(axes: Any, rows: list[dict]) -> None:
    """Draw which share of the matrix units and of the HBM's bandwidth is in use over time."""
    end = rows[-1]["start_ms"] + rows[-1]["estimate_ms"]
    times = [end * (n + 0.5) / _BINS for n in range(_BINS)]
    mxu, hbm = (binned(rows, key, end) for key in ("mxu_share", "hbm_share"))
    axes.fill_between(times, [100 * x for x in mxu], color="#2c6fad", alpha=0.75, linewidth=0)
    axes.plot(times, [100 * x for x in hbm], color="#d1495b", linewidth=1)
    axes.set_xlim(0, end)
    axes.set_ylim(0, 105)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.grid(axis="y", color=_FAINT, linewidth=0.7)
    axes.set_axisbelow(True)
    means = (sum(values) / _BINS for values in (mxu, hbm))
    axes.set_title("", loc="left")
    for x, color, name, mean in zip((0.0, 0.2), ("#2c6fad", "#d1495b"), ("matrix units", "HBM"), means, strict=True):
        axes.text(x, 1.04, f"{name} busy, {mean:.0%} on average", color=color, fontsize=10, transform=axes.transAxes)
    axes.set_xlabel("ms into the step", fontsize=9, color=_INK)
    _bare(axes, "bottom")


def binned(rows: list[dict], key: str, end: float, bins: int = _BINS) -> list[float]:
    """Return the average of a share over each of `bins` equal spans of the time up to `end`; None counts as 0."""
    totals, width = [0.0] * bins, end / bins
    for row in rows:
        start, stop = row["start_ms"], row["start_ms"] + row["estimate_ms"]
        for n in range(int(start / width), min(bins, int(stop / width) + 1)):
            overlap = min(stop, (n + 1) * width) - max(start, n * width)
            totals[n] += max(0.0, overlap) * (row[key] or 0.0)
    return [min(1.0, total / width) for total in totals]


def _parts(axes: Any, rows: list[dict]) -> None:
    parts: dict[str, float] = {}
    for row in rows:
        parts[row["part"]] = parts.get(row["part"], 0.0) + row["estimate_ms"]
    total = sum(parts.values())
    ordered = sorted(((name, ms) for name, ms in parts.items() if ms > _VISIBLE * total), key=lambda item: -item[1])
    names = [name for name, _ in ordered]
    axes.barh(names, [ms for _, ms in ordered], color=[_color(name) for name in names], height=0.7)
    for name, ms in ordered:
        axes.text(ms, name, f"  {ms:.1f} ms, {ms / total:.0%}", va="center", fontsize=9, color=_INK)
    axes.set_xlim(0, 1.35 * ordered[0][1])
    _horizontal(axes, "Where the time goes")


def _kernels(axes: Any, rows: list[dict]) -> None:
    longest = max((row["estimate_ms_in_all"] for row in rows), default=1.0)
    for place, row in enumerate(rows):
        ms = row["estimate_ms_in_all"]
        axes.barh(place, ms, color=_color(row["part"]), height=0.7)
        note = f"  {ms:.2f} ms = {row['times_run']} × {row['estimate_ms']:.3f}, bound by {row['bound_by']}"
        axes.text(ms, place, note, va="center", fontsize=9, color=_INK)
    labels = [f"{row['op'].removeprefix('aten__')}  {row['kernel']}".strip() for row in rows]
    axes.set_yticks(range(len(rows)), labels)
    axes.set_xlim(0, 1.9 * longest)
    _horizontal(axes, "The longest kernels, by torch operation and XLA's name")


def _horizontal(axes: Any, title: str) -> None:
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.set_xticks([])
    _bare(axes, "left")
