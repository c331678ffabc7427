"""The verdict on a sweep: one row per variant, as a table, JSON, Markdown and a bar chart."""

from pathlib import Path

from rich.console import Console
from rich.table import Table

from vitkernels.training.run_folder import read_json, read_results, write_json

_RATIO = "ratio: median step time of the first variant over this one's; above 1 is faster"
# (heading, function of a row): what the tables show, in order, where any row has it.
_COLUMNS = (
    ("variant", lambda row: row["variant"]),
    ("step ms (p10, p90)", lambda row: _step(row)),
    ("images/s", lambda row: _number(row["images_per_s"], 1)),
    ("MFU %", lambda row: _number(row["mfu"] and 100 * row["mfu"], 1)),
    ("input wait ms", lambda row: _number(row["input_wait_ms"], 2)),
    ("peak memory MiB", lambda row: _number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20, 0)),
    ("weights MB", lambda row: _number(row["bytes"] and row["bytes"] / 1e6, 2)),
    ("final loss", lambda row: _number(row["train_loss"], 4)),
    ("val top-1 %", lambda row: _number(row["val_top1"], 2)),
    ("ratio", lambda row: _number(row["ratio"], 3)),
)


def compare(folder: Path, since: float = 0.0) -> list[dict]:
    """One row per job in a sweep's folder, in the order they were launched.

    since: seconds of the epoch; jobs that ended earlier, and so belong to another sweep in the folder, are left out.

    Keys: variant, status ("done" or "failed"), reason, step_time_ms {median, p10, p90, mean, n}, images_per_s, mfu
    (0 to 1), input_wait_ms, peak_memory_bytes, bytes (of the weights, in evaluations), train_loss, val_top1, ratio
    (median step time of the first variant over this one's: above 1 is faster), folder. What is not known is None.
    """
    files = [path for path in folder.rglob("job.json") if path.stat().st_mtime >= since]
    jobs = [(job, path.parent) for path in files if (job := read_json(path)) is not None]
    jobs.sort(key=lambda pair: (pair[0]["num"], pair[0]["variant"]))
    rows = [_row(job, path, folder) for job, path in jobs]
    first = next((_median(row) for row in rows), None)
    for row in rows:
        median = _median(row)
        row["ratio"] = None if not first or not median else round(first / median, 4)
    return rows


def _row(job: dict, path: Path, folder: Path) -> dict:
    done = job["status"] == "done"
    results = read_results(path) if done else {}
    times = ("step_time_ms", "images_per_s", "mfu", "input_wait_ms")
    figures = (*times, "peak_memory_bytes", "bytes", "train_loss", "val_top1")
    return {
        "variant": job["variant"],
        "status": job["status"],
        "reason": job.get("reason"),
        "device": results.get("device"),
        "attn": results.get("attn"),
        **{name: results.get(name) for name in figures},
        "folder": str(path.relative_to(folder)),
    }


def _median(row: dict) -> float | None:
    return (row["step_time_ms"] or {}).get("median")


def _timed(rows: list[dict]) -> bool:
    return any(_median(row) for row in rows)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


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
    lines += [f"{_RATIO}."] if _timed(rows) else []
    devices = sorted({row["device"] for row in rows if row["device"]})
    lines += [f"device: {', '.join(devices)}"] if devices else []
    lines += [f"- **{row['variant']}** failed: {row['reason']}" for row in rows if row["status"] != "done"]
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
    if _timed(rows):
        console.print(_RATIO, style="dim")
    console.print(f"written: {folder}/comparison.{{md,json,png}}", markup=False, style="dim", soft_wrap=True)


def plot(rows: list[dict], path: Path) -> None:
    """A horizontal bar per variant: median step time, whiskers from p10 to p90."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    widest = max([row["step_time_ms"]["p90"] for row in rows if _median(row)], default=1.0)
    for y, row in enumerate(rows):
        median = _median(row)
        if median is None:
            failed = row["status"] != "done"
            reason = f"failed: {row['reason']}" if failed else "no step was timed"
            axes.text(0.01 * widest, y, reason[:90], va="center", color="tab:red" if failed else "gray", fontsize=9)
            continue
        times = row["step_time_ms"]
        axes.barh(y, median, color="tab:blue" if y else "tab:gray", height=0.62)
        axes.errorbar(
            median, y, xerr=[[median - times["p10"]], [times["p90"] - median]], color="black", capsize=4, linewidth=1.2
        )
        ratio = "" if row["ratio"] is None else f"  (×{row['ratio']:.2f})"  # none when the first variant failed
        axes.text(times["p90"] + 0.015 * widest, y, f"{median:.2f} ms{ratio}", va="center", fontsize=10)
    axes.set_yticks(range(len(rows)), [row["variant"] for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, widest * 1.28)
    axes.set_xlabel("median step time in ms, whiskers p10 to p90 (shorter is faster)")
    devices = sorted({row["device"] for row in rows if row["device"]})
    axes.set_title(", ".join(devices) or "no variant finished", fontsize=11, loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
