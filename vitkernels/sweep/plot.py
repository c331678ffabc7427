"""Draw the verdict's picture: step times, speedups with their intervals, and the caveats."""

import textwrap
from pathlib import Path
from statistics import median

from vitkernels.sweep.caveats import find_caveats
from vitkernels.sweep.judgement import sentences
from vitkernels.sweep.statistics import median_step_times

_MOST_SPREAD = 1.5  # times the longest bar: whiskers beyond it are cut
_OUTLIER = 3.0  # times the median of the variants: longer bars are cut at the axis' end
_COLORS = {"faster": "tab:green", "slower": "tab:red", "level": "tab:blue", "open": "tab:blue"}
_MOST_LINES, _LINE_CHARACTERS = 9, 165


def write_chart(rows: list[dict], path: Path) -> None:
    """Write the chart as a PNG file."""
    draw_chart(rows).savefig(path, dpi=150)


def draw_chart(rows: list[dict]):
    """Return a matplotlib figure: a bar per variant at its median step time, with the speedup and its interval.

    Bars are the medians of the rounds, or of the training runs if there were no rounds; whiskers reach from p10 to p90
    of the training run's steps, or from the fastest to the slowest round. Dots mark rounds or repeats. If the variants'
    steps hold different numbers of images, times are per image. Below the axis are the verdict and its caveats.
    """
    from matplotlib.figure import Figure

    notes = _notes(rows)
    chart = Figure(figsize=(10, 2.1 + 0.55 * len(rows) + 0.19 * len(notes)), layout="constrained")
    axes = chart.add_subplot()
    sizes = {row["images_per_step"] for row in rows if _time(row)}
    per_image = len(sizes) > 1 and None not in sizes
    end = _end_of_axis(rows, per_image)
    for y, row in enumerate(rows):
        if _time(row):
            _draw_bar(axes, y, row, per_image, end)
        else:
            failed = row["status"] != "done"
            text = f"failed: {row['reason']}" if failed else "no step was timed"
            axes.text(0.01 * end, y, text[:90], va="center", color="tab:red" if failed else "gray", fontsize=9)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, end * 1.45)
    axes.set_xlabel(_axis_label(rows, per_image), fontsize=9)
    axes.set_title(_title(rows), fontsize=10.5, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    if notes:
        chart.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=8, color="0.25")
    return chart


def _title(rows: list[dict]) -> str:
    """Return what was measured: model, batch, precision, devices and date."""

    def all_of(key: str, form: str = "{}") -> str:
        values = list(dict.fromkeys(form.format(row[key]) for row in rows if row[key]))
        return " / ".join(values)

    dates = sorted({row["finished"][:10] for row in rows if row["finished"]})
    period = " to ".join(dict.fromkeys(dates[:1] + dates[-1:]))
    devices = " / ".join(dict.fromkeys(_device(row) for row in rows if row["device"]))
    parts = (all_of("model"), all_of("images_per_step", "{} images/step"), all_of("precision"), devices, period)
    return ", ".join(filter(None, parts)) or "no variant finished"


def _device(row: dict) -> str:
    return row["device"] if row["devices"] in (None, 1) else f"{row['devices']} × {row['device']}"


def _notes(rows: list[dict]) -> list[str]:
    """Return the verdict and its caveats, wrapped; what does not fit is counted."""
    lines = [
        line
        for note in (*sentences(rows), *find_caveats(rows))
        for line in textwrap.wrap(f"• {note}", _LINE_CHARACTERS, subsequent_indent="   ")
    ]
    hidden = len(lines) - _MOST_LINES
    return lines if hidden <= 0 else [*lines[: _MOST_LINES - 1], f"… {hidden + 1} more lines in comparison.md"]


def _time(row: dict) -> float | None:
    """Return the row's step time in ms: of its rounds, or of its training."""
    if row["rounds"]:
        return median(row["rounds"]["step_ms"])
    return row["step_time_ms"]["median"] if median_step_times(row) else None


def _end_of_axis(rows: list[dict], per_image: bool) -> float:
    """Return where the longest mark ends that is drawn in full: an outlier does not decide the scale."""
    timed = [(_scale(row, per_image), time, _spread(row)[1]) for row in rows if (time := _time(row))]
    if not timed:
        return 1.0
    limit = _OUTLIER * median(scale * time for scale, time, _ in timed)
    bars = max(scale * time for scale, time, _ in timed if scale * time <= limit)
    marks = (scale * high for scale, time, high in timed if scale * time <= limit)
    return max(bars, min(max(marks), _MOST_SPREAD * bars))


def _draw_bar(axes, y: int, row: dict, per_image: bool, end: float) -> None:
    scale = _scale(row, per_image)
    time = scale * (_time(row) or 0)
    low, high, dots = (_scaled(value, scale) for value in _spread(row))
    limit, unit = 1.02 * end, "µs" if per_image else "ms"
    color = "0.8" if row["interpreted"] else _COLORS.get(row["judgement"], "tab:gray")
    cut = time > limit
    style = {"hatch": "//", "edgecolor": "white"} if cut else {}
    axes.barh(y, min(time, limit), color=color, height=0.62, **style)
    if not cut:
        left, right = time - min(low, time), min(max(high, time), limit) - time
        axes.errorbar(time, y, xerr=[[left], [right]], color="black", capsize=4, linewidth=1.2)
        inside = [dot for dot in dots if dot <= limit]
        if inside:
            axes.plot(inside, [y] * len(inside), "o", color="tab:orange", markersize=3.5, zorder=3)
    start = limit if cut else min(max(high, time, *dots, 0.0), limit)
    text = f"{'▶ ' if cut else ''}{time:.2f} {unit}{_speedup(row)}"
    axes.text(start + 0.015 * end, y, text, va="center", fontsize=9.5)


def _scaled(value, scale: float):
    return [scale * one for one in value] if isinstance(value, list) else scale * value


def _spread(row: dict) -> tuple[float, float, list[float]]:
    """Return where the whiskers begin and end, and the dots."""
    if row["rounds"]:
        times = row["rounds"]["step_ms"]
        return min(times), max(times), times
    times = row["step_time_ms"]
    return times["p10"], times["p90"], median_step_times(row) if row["repeats"] else []


def _axis_label(rows: list[dict], per_image: bool) -> str:
    measure = "median time per image in µs" if per_image else "median step time in ms"
    in_rounds = any(row["rounds"] for row in rows)
    spread = "dots and whiskers: rounds" if in_rounds else "whiskers from p10 to p90 of the steps"
    if not in_rounds and any(row["repeats"] for row in rows):
        spread += ", dots: medians of the repeats"
    return f"{measure} (shorter is faster); {spread}"


def _speedup(row: dict) -> str:
    if row["interpreted"]:
        return "  interpreted: no speedup"
    if row["ratio"] is None:
        return ""
    interval = "" if row["ratio_interval"] is None else " ({:.2f} to {:.2f})".format(*row["ratio_interval"])
    mark = {"level": " no difference shown", "open": " open"}.get(row["judgement"], "")
    return f"  ×{row['ratio']:.2f}{interval}{mark}"


def _scale(row: dict, per_image: bool) -> float:
    """Return the factor from ms per step to the chart's unit: ms per step, or µs per image."""
    return 1e3 / row["images_per_step"] if per_image else 1.0
