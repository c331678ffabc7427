"""Draw the verdict's bar chart."""

from pathlib import Path

from vitkernels.sweep.statistics import differs_from_one, median_step_times


def write_chart(rows: list[dict], path: Path) -> None:
    """Write the chart as a PNG file."""
    draw_chart(rows).savefig(path, dpi=150)


def draw_chart(rows: list[dict]):
    """Return a matplotlib figure: a bar per variant at its median step time, whiskers from p10 to p90.

    Dots mark the medians of repeats. If the variants' steps hold different numbers of images, times are per image.
    """
    from matplotlib.figure import Figure

    chart = Figure(figsize=(9, 1.8 + 0.55 * len(rows)), layout="constrained")
    axes = chart.add_subplot()
    sizes = {row["images_per_step"] for row in rows if median_step_times(row)}
    per_image = len(sizes) > 1 and None not in sizes
    widest = max((_scale(row, per_image) * _extent(row) for row in rows if median_step_times(row)), default=1.0)
    for y, row in enumerate(rows):
        if median_step_times(row):
            _draw_bar(axes, y, row, per_image, widest)
        else:
            failed = row["status"] != "done"
            text = f"failed: {row['reason']}" if failed else "no step was timed"
            axes.text(0.01 * widest, y, text[:90], va="center", color="tab:red" if failed else "gray", fontsize=9)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.32)
    axes.set_xlabel(_axis_label(rows, per_image))
    devices = sorted({row["device"] for row in rows if row["device"]})
    axes.set_title(", ".join(devices) or "no variant finished", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return chart


def _draw_bar(axes, y: int, row: dict, per_image: bool, widest: float) -> None:
    scale = _scale(row, per_image)
    median, p10, p90 = (scale * row["step_time_ms"][name] for name in ("median", "p10", "p90"))
    axes.barh(y, median, color="tab:blue" if y else "tab:gray", height=0.62)
    axes.errorbar(median, y, xerr=[[median - p10], [p90 - median]], color="black", capsize=4, linewidth=1.2)
    if row["repeats"]:
        dots = [scale * time for time in median_step_times(row)]
        axes.plot(dots, [y] * len(dots), "o", color="tab:orange", markersize=4, zorder=3)
    unit = "µs" if per_image else "ms"
    label = f"{median:.2f} {unit}{_speedup(row)}"
    axes.text(scale * _extent(row) + 0.015 * widest, y, label, va="center", fontsize=10)


def _axis_label(rows: list[dict], per_image: bool) -> str:
    measure = "median time per image in µs" if per_image else "median step time in ms"
    label = f"{measure}, whiskers from p10 to p90 (shorter is faster)"
    label += "\ndots: medians of the repeats" if any(row["repeats"] for row in rows) else ""
    return label + ("" if all(map(differs_from_one, rows)) else "; ~: not significantly different from the first")


def _speedup(row: dict) -> str:
    return "" if row["ratio"] is None else f"  (×{row['ratio']:.2f}{'' if differs_from_one(row) else ' ~'})"


def _scale(row: dict, per_image: bool) -> float:
    """Return the factor from ms per step to the chart's unit: ms per step, or µs per image."""
    return 1e3 / row["images_per_step"] if per_image else 1.0


def _extent(row: dict) -> float:
    """Return the longest time that the row's marks reach, in ms per step."""
    return max(row["step_time_ms"]["p90"], *median_step_times(row), 0.0)
