"""Compare the variants of a sweep: one row per variant, as a table, JSON, Markdown and a bar chart."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vitkernels.files import read_json, write_json
from vitkernels.sweep.caveats import MIN_STEPS_FOR_RATIO, fewest_timed_steps, find_caveats, incomparable
from vitkernels.sweep.plot import write_chart
from vitkernels.sweep.statistics import differs_from_one, median_step_times, merge_repeats, ratio_interval
from vitkernels.training.run_dir import read_results

_SPEEDUP = (
    "speedup: time per image of the first variant divided by this variant's, at the median step; above 1 is faster"
)
_INTERVAL = "; in brackets the 95 % confidence interval over the repeats, ~ where it includes 1"
_REPEATS = "; ×N: N repeats, with the geometric mean of their step times and ± half the range of losses and accuracies"
# Keys of a run's summary or evaluation that a row copies.
_FIGURES = (
    "step_time_ms", "images_per_s", "mfu", "input_wait_ms", "peak_memory_bytes", "bytes", "train_loss", "val_top1",
    "attn", "model", "precision", "quant", "device", "devices", "host_bound", "parameters_without_gradient",
)  # fmt: skip
# The columns of the table in order: (heading, function from a row to a cell). A column without any value is left out.
_COLUMNS = (
    ("variant", lambda row: row["variant"]),
    ("step ms (p10, p90)", lambda row: _step_time(row)),
    ("medians of repeats", lambda row: _range_of_medians(row)),
    ("images/s", lambda row: _number(row["images_per_s"], 1)),
    ("MFU %", lambda row: _number(row["mfu"] and 100 * row["mfu"], 1)),
    ("input wait ms", lambda row: _number(row["input_wait_ms"], 2)),
    ("peak memory MiB", lambda row: _number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20, 0)),
    ("weights MB", lambda row: _number(row["bytes"] and row["bytes"] / 1e6, 2)),
    ("final loss", lambda row: _number(row["train_loss"], 4, row.get("train_loss_half_range"))),
    ("val top-1 %", lambda row: _number(row["val_top1"], 2, row.get("val_top1_half_range"))),
    ("speedup", lambda row: _speedup(row)),
)
_MISSING = "–"


def compare(folder: Path, since: float = 0.0) -> list[dict]:
    """Return one row per variant of the sweep in `folder`, in launch order; each failed run has its own row.

    Args:
        folder: the sweep's folder, with one folder per job in it.
        since: seconds since the epoch. Jobs that ended earlier belong to another sweep and are left out.

    Keys of a row: variant, status ("done" or "failed"), reason, step_time_ms {median, p10, p90, mean, n},
    images_per_step, images_per_s and mfu (0 to 1) at the median step, input_wait_ms, peak_memory_bytes, bytes (of the
    weights, for evaluations), train_loss, val_top1, commit, folder and others of a run's summary; repeats (the rows of
    runs that differ only in their seed, or None for a single run; the other figures then describe all of them, see
    statistics.merge_repeats); ratio (the first variant's time per image over this one's: above 1 is faster) and
    ratio_interval (if anything was repeated). A figure that is unknown, or a ratio of runs that cannot be compared, is
    None.
    """
    files = [path for path in folder.rglob("job.json") if path.stat().st_mtime >= since]
    jobs = [(job, path.parent) for path in files if (job := read_json(path)) is not None]
    jobs.sort(key=lambda pair: (pair[0]["num"], pair[0]["variant"]))
    rows = merge_repeats([_row(job, path, folder) for job, path in jobs])
    for row in rows:
        row["ratio"] = ratio = _time_ratio(rows[0], row)
        row["ratio_interval"] = None if ratio is None or row is rows[0] else ratio_interval(ratio, rows[0], row)
    return rows


def _row(job: dict, path: Path, folder: Path) -> dict:
    results = read_results(path) if job["status"] == "done" else {}
    figures = {name: results.get(name) for name in _FIGURES}
    images, flops = results.get("batch_size"), results.get("train_flops_per_step")
    return {
        "variant": job["variant"],
        "status": job["status"],
        "reason": job.get("reason"),
        "num": job["num"],
        "overrides": job.get("overrides", [job["variant"]]),
        **figures,
        **_at_the_median_step(figures, images),
        "images_per_step": images,
        "flops_per_image": flops / images if images and flops else None,
        "commit": results.get("git_commit"),
        "code": (job.get("circumstances") or {}).get("code") or results.get("git_commit"),
        "repeats": None,
        "folder": str(path.relative_to(folder)),
    }


def _at_the_median_step(figures: dict, images: int | None) -> dict:
    """Return throughput and MFU at the median step.

    A summary has them at the mean step. A row uses one measure throughout, and a caveat reports stalls.
    """
    times = figures["step_time_ms"]
    if not times or not times["median"]:  # an evaluation, which reports its own throughput
        return {}
    mfu = figures["mfu"] and round(figures["mfu"] * times["mean"] / times["median"], 5)
    return {"images_per_s": images and round(images / times["median"] * 1e3, 2), "mfu": mfu}


def _time_ratio(base: dict, row: dict) -> float | None:
    base_time, time = _time_per_image(base), _time_per_image(row)
    if not base_time or not time or incomparable(base, row):
        return None
    base_steps, steps = fewest_timed_steps(base), fewest_timed_steps(row)
    assert base_steps is not None and steps is not None  # both have a time
    if min(base_steps, steps) < MIN_STEPS_FOR_RATIO:
        return None
    return round(base_time / time, 4)


def _time_per_image(row: dict) -> float | None:
    median = (row["step_time_ms"] or {}).get("median")
    return row["images_per_step"] and median and median / row["images_per_step"]


def _legend(rows: list[dict]) -> str | None:
    if not any(row["ratio"] for row in rows):
        return None
    legend = _SPEEDUP + (_INTERVAL if any(row["ratio_interval"] for row in rows) else "")
    return legend + (_REPEATS if any(row["repeats"] for row in rows) else "")


def _number(value: float | None, digits: int, half_range: float | None = None) -> str:
    spread = "" if half_range is None else f" ± {half_range:.{digits}f}"
    return _MISSING if value is None else f"{value:.{digits}f}{spread}"


def _speedup(row: dict) -> str:
    if row["ratio"] is None or row["ratio_interval"] is None:
        return _number(row["ratio"], 3)
    low, high = row["ratio_interval"]
    return f"{row['ratio']:.3f} ({low:.3f}, {high:.3f})" + ("" if differs_from_one(row) else " ~")


def _range_of_medians(row: dict) -> str:
    medians = median_step_times(row) if row["repeats"] else []
    return f"{min(medians):.2f} to {max(medians):.2f}" if medians else _MISSING


def _step_time(row: dict) -> str:
    if row["status"] != "done":
        return "failed"
    times = row["step_time_ms"]
    if not times:  # an evaluation has no steps
        return _MISSING
    if not times["n"]:
        return "none timed"
    return f"{times['median']:.2f} ({times['p10']:.2f}, {times['p90']:.2f})"


def _columns(rows: list[dict]) -> list[tuple]:
    """Return the columns in which any row has a value."""
    used = [column for column in _COLUMNS[1:] if any(column[1](row) != _MISSING for row in rows)]
    return [_COLUMNS[0], *used]


def write(rows: list[dict], folder: Path) -> None:
    """Write comparison.json, comparison.md and comparison.png to the sweep's folder."""
    write_json(folder / "comparison.json", rows)
    (folder / "comparison.md").write_text(markdown(rows))
    write_chart(rows, folder / "comparison.png")


def markdown(rows: list[dict]) -> str:
    """Return the table in Markdown, followed by its legend, the reasons of failures, and the caveats."""
    columns = _columns(rows)
    lines = [
        "| " + " | ".join(heading for heading, _ in columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(cell(row) for _, cell in columns) + " |" for row in rows),
        "",
    ]
    lines += [f"{legend}."] if (legend := _legend(rows)) else []
    devices = sorted({row["device"] for row in rows if row["device"]})
    lines += [f"device: {', '.join(devices)}"] if devices else []
    lines += [f"- **{row['variant']}** failed: {row['reason']}" for row in rows if row["status"] != "done"]
    lines += [f"- {caveat}" for caveat in find_caveats(rows)]
    return "\n".join(lines) + "\n"


def show(rows: list[dict], folder: Path) -> None:
    """Print the table and its caveats to the terminal."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)
    table = Table(title="Verdict", title_justify="left")
    columns = _columns(rows)
    for i, (heading, _) in enumerate(columns):
        table.add_column(heading, justify="left" if i == 0 else "right", overflow="fold")
    for row in rows:
        table.add_row(*(cell(row) for _, cell in columns), style=None if row["status"] == "done" else "red")
    console.print(table)
    for row in rows:
        if row["status"] != "done":
            console.print(f"{row['variant']} failed: {row['reason']}", style="red", markup=False)
    if legend := _legend(rows):
        console.print(legend, style="dim")
    for caveat in find_caveats(rows):
        console.print(f"- {caveat}", style="dim", markup=False)
    console.print(f"written to {folder}/comparison.{{md,json,png}}", markup=False, style="dim", soft_wrap=True)
