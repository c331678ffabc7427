"""The verdict's bar chart."""

from pathlib import Path

from vitkernels.sweep.statistics import medians, told_apart


def plot(rows: list[dict], path: Path) -> None:
    """The chart as a PNG."""
    figure(rows).savefig(path, dpi=150)


def figure(rows: list[dict]):
    """A horizontal bar per variant: median step time, whiskers from p10 to p90, dots for the medians of repeats.

    Where steps are not of the same number of images, all of it is per image.
    """
    from matplotlib.figure import Figure

    chart = Figure(figsize=(9, 1.8 + 0.55 * len(rows)), layout="constrained")
    axes = chart.add_subplot()
    sizes = {row["images_per_step"] for row in rows if medians(row)}
    per_image = len(sizes) > 1 and None not in sizes
    reach = [_reach(row) * _scale(row, per_image) for row in rows if medians(row)]
    widest = max(reach, default=1.0)
    for y, row in enumerate(rows):
        if medians(row):
            _bar(axes, y, row, per_image, widest)
        else:
            failed = row["status"] != "done"
            reason = f"failed: {row['reason']}" if failed else "no step was timed"
            axes.text(0.01 * widest, y, reason[:90], va="center", color="tab:red" if failed else "gray", fontsize=9)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.32)
    axes.set_xlabel(_legend(rows, per_image))
    devices = sorted({row["device"] for row in rows if row["device"]})
    axes.set_title(", ".join(devices) or "no variant finished", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    return chart


def _bar(axes, y: int, row: dict, per_image: bool, widest: float) -> None:
    scale = _scale(row, per_image)
    median, p10, p90 = (scale * row["step_time_ms"][name] for name in ("median", "p10", "p90"))
    axes.barh(y, median, color="tab:blue" if y else "tab:gray", height=0.62)
    axes.errorbar(median, y, xerr=[[median - p10], [p90 - median]], color="black", capsize=4, linewidth=1.2)
    if row["repeats"]:
        found = [scale * one for one in medians(row)]
        axes.plot(found, [y] * len(found), "o", color="tab:orange", markersize=4, zorder=3)
    unit = "µs" if per_image else "ms"
    axes.text(scale * _reach(row) + 0.015 * widest, y, f"{median:.2f} {unit}{_ratio(row)}", va="center", fontsize=10)


def _legend(rows: list[dict], per_image: bool) -> str:
    measure = "median time per image in µs" if per_image else "median step time in ms"
    legend = f"{measure}, whiskers p10 to p90 (shorter is faster)"
    legend += "\ndots: each repeat's median" if any(row["repeats"] for row in rows) else ""
    return legend + ("" if all(map(told_apart, rows)) else "; ~: not told apart from the first")


def _ratio(row: dict) -> str:
    return "" if row["ratio"] is None else f"  (×{row['ratio']:.2f}{'' if told_apart(row) else ' ~'})"


def _scale(row: dict, per_image: bool) -> float:
    return 1e3 / row["images_per_step"] if per_image else 1.0


def _reach(row: dict) -> float:
    return max(row["step_time_ms"]["p90"], *medians(row), 0.0)
