"""The verdict on a sweep: one row per variant, as a table, JSON, Markdown and a bar chart."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vitkernels.sweep.caveats import FEWEST_STEPS, not_comparable, remarks, steps_of
from vitkernels.sweep.plot import plot
from vitkernels.sweep.statistics import medians, merge, ratio_interval, told_apart
from vitkernels.training.run_dir import read_json, read_results, write_json

_RATIO = "ratio: the first variant's time per image over this one's, by median steps; above 1 is faster"
_INTERVAL = "; in brackets its 95 % confidence interval by the repeats; ~: not told apart from 1"
_REPEATS = "; ×: so many repeats, of whose step times it is the geometric mean, and ± half the range of the rest"
# Of a run's summary, or its evaluation.
_FIGURES = (
    "step_time_ms", "images_per_s", "mfu", "input_wait_ms", "peak_memory_bytes", "bytes", "train_loss", "val_top1",
    "attn", "model", "precision", "quant", "device", "devices", "host_bound", "parameters_without_gradient",
)  # fmt: skip
# (heading, function of a row): what the tables show, in order, where any row has it.
_COLUMNS = (
    ("variant", lambda row: row["variant"]),
    ("step ms (p10, p90)", lambda row: _step(row)),
    ("repeats' medians", lambda row: _range(row)),
    ("images/s", lambda row: _number(row["images_per_s"], 1)),
    ("MFU %", lambda row: _number(row["mfu"] and 100 * row["mfu"], 1)),
    ("input wait ms", lambda row: _number(row["input_wait_ms"], 2)),
    ("peak memory MiB", lambda row: _number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20, 0)),
    ("weights MB", lambda row: _number(row["bytes"] and row["bytes"] / 1e6, 2)),
    ("final loss", lambda row: _number(row["train_loss"], 4, row.get("train_loss_half_range"))),
    ("val top-1 %", lambda row: _number(row["val_top1"], 2, row.get("val_top1_half_range"))),
    ("ratio", lambda row: _ratio(row)),
)


def compare(folder: Path, since: float = 0.0) -> list[dict]:
    """One row per variant in a sweep's folder, in the order they were launched; those that failed each have one too.

    since: seconds of the epoch; jobs that ended earlier, and so belong to another sweep in the folder, are left out.

    Keys: variant, status ("done" or "failed"), reason, step_time_ms {median, p10, p90, mean, n}, images_per_step,
    images_per_s and mfu (0 to 1) by the median step, input_wait_ms, peak_memory_bytes, bytes (of the weights, in
    evaluations), train_loss, val_top1, commit, folder and others of a run's summary; repeats (rows of the runs that
    differ by their seed alone, None of a single one: the figures are then theirs together, as repeats.merge has them);
    ratio (the first variant's time per image over this one's: above 1 is faster) and ratio_interval (where anything was
    repeated). What is not known, or would compare what cannot be compared, is None.
    """
    files = [path for path in folder.rglob("job.json") if path.stat().st_mtime >= since]
    jobs = [(job, path.parent) for path in files if (job := read_json(path)) is not None]
    jobs.sort(key=lambda pair: (pair[0]["num"], pair[0]["variant"]))
    rows = merge([_row(job, path, folder) for job, path in jobs])
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
        **_by_median(figures, images),
        "images_per_step": images,
        "flops_per_image": flops / images if images and flops else None,
        "commit": results.get("git_commit"),
        "code": (job.get("circumstances") or {}).get("code") or results.get("git_commit"),
        "repeats": None,
        "folder": str(path.relative_to(folder)),
    }


def _by_median(figures: dict, images: int | None) -> dict:
    """Speed and MFU, which a summary has by the mean step: a row is to have one measure, and stalls a remark."""
    times = figures["step_time_ms"]
    if not times or not times["median"]:  # of an evaluation they are its own
        return {}
    mfu = figures["mfu"] and round(figures["mfu"] * times["mean"] / times["median"], 5)
    return {"images_per_s": images and round(images / times["median"] * 1e3, 2), "mfu": mfu}


def _time_ratio(base: dict, row: dict) -> float | None:
    times = [one["images_per_step"] and _median(one) and _median(one) / one["images_per_step"] for one in (base, row)]
    if None in times or not_comparable(base, row) or min(steps_of(base), steps_of(row)) < FEWEST_STEPS:
        return None
    return round(times[0] / times[1], 4)


def _median(row: dict) -> float | None:
    return (row["step_time_ms"] or {}).get("median")


def _legend(rows: list[dict]) -> str | None:
    if not any(row["ratio"] for row in rows):
        return None
    said = _RATIO + (_INTERVAL if any(row["ratio_interval"] for row in rows) else "")
    return said + (_REPEATS if any(row["repeats"] for row in rows) else "")


def _number(value: float | None, digits: int, half_range: float | None = None) -> str:
    spread = "" if half_range is None else f" ± {half_range:.{digits}f}"
    return "–" if value is None else f"{value:.{digits}f}{spread}"


def _ratio(row: dict) -> str:
    if row["ratio"] is None or row["ratio_interval"] is None:
        return _number(row["ratio"], 3)
    low, high = row["ratio_interval"]
    return f"{row['ratio']:.3f} ({low:.3f}, {high:.3f})" + ("" if told_apart(row) else " ~")


def _range(row: dict) -> str:
    found = medians(row) if row["repeats"] else []
    return f"{min(found):.2f} to {max(found):.2f}" if found else "–"


def _step(row: dict) -> str:
    if row["status"] != "done":
        return "failed"
    times = row["step_time_ms"]
    if not times:  # an evaluation has no steps
        return "–"
    if not times["n"]:
        return "none timed"
    return f"{times['median']:.2f} ({times['p10']:.2f}, {times['p90']:.2f})"


def _columns(rows: list[dict]) -> list[tuple]:
    return [_COLUMNS[0], *((heading, cell) for heading, cell in _COLUMNS[1:] if any(cell(row) != "–" for row in rows))]


def write(rows: list[dict], folder: Path) -> None:
    """comparison.json, comparison.md and comparison.png in the sweep's folder."""
    write_json(folder / "comparison.json", rows)
    (folder / "comparison.md").write_text(markdown(rows))
    plot(rows, folder / "comparison.png")


def markdown(rows: list[dict]) -> str:
    """The table in Markdown, failures with their reasons below it."""
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
    lines += [f"- {remark}" for remark in remarks(rows)]
    return "\n".join(lines) + "\n"


def show(rows: list[dict], folder: Path) -> None:
    """The table on the terminal."""
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
    for remark in remarks(rows):
        console.print(f"- {remark}", style="dim", markup=False)
    console.print(f"written: {folder}/comparison.{{md,json,png}}", markup=False, style="dim", soft_wrap=True)
