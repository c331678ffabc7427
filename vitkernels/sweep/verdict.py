"""Compare the variants of a sweep: one row per variant, as a table, JSON, Markdown and a bar chart."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from vitkernels.errors import UsageError
from vitkernels.files import read_json, write_json
from vitkernels.sweep.caveats import find_caveats
from vitkernels.sweep.interleave import RECORD
from vitkernels.sweep.judgement import interpreters, judge, sentences
from vitkernels.sweep.plot import write_chart
from vitkernels.sweep.statistics import median_step_times, merge_repeats
from vitkernels.training.run_dir import read_results
from vitkernels.training.step_timer import PARTS

_SPEEDUP = "speedup: time per image of the first variant divided by this variant's; above 1 is faster"
_IN_ROUNDS = ", measured in rounds in which the variants took turns"
_INTERVAL = "; in brackets the 95 % confidence interval over {}"
_MARKS = {"level": "~: the interval includes 1", "open": "?: the measurement cannot tell which is faster, see below"}
_REPEATS = "; ×N: N repeats, with the geometric mean of their step times and ± half the range of losses and accuracies"
# Keys of a run's summary or evaluation that a row copies.
_FIGURES = (
    "step_time_ms", "images_per_s", "mfu", *PARTS, "peak_memory_bytes", "bytes", "train_loss", "val_top1",
    "attn", "model", "precision", "quant", "device", "devices", "host_bound", "parameters_without_gradient", "runtime",
    "machine",
)  # fmt: skip
# The columns of the table in order: (heading, function from a row to a cell). A column without any value is left out.
_COLUMNS = (
    ("variant", lambda row: row["variant"]),
    ("step ms (p10, p90)", lambda row: _step_time(row)),
    ("medians of repeats", lambda row: _range_of_medians(row)),
    ("in rounds", lambda row: _in_rounds(row)),
    ("images/s", lambda row: _number(row["images_per_s"], 1)),
    ("MFU %", lambda row: _number(row["mfu"] and 100 * row["mfu"], 1)),
    ("input + host + device + rest ms", lambda row: _split(row)),
    ("peak memory MiB", lambda row: _number(row["peak_memory_bytes"] and row["peak_memory_bytes"] / 2**20, 0)),
    ("weights MB", lambda row: _number(row["bytes"] and row["bytes"] / 1e6, 2)),
    ("final loss", lambda row: _number(row["train_loss"], 4, row.get("train_loss_half_range"))),
    ("val top-1 %", lambda row: _number(row["val_top1"], 2, row.get("val_top1_half_range"))),
    ("speedup", lambda row: _speedup(row)),
)
_MISSING = "–"


def compare(folder: Path, since: float = 0.0, record: Mapping[str, Any] | None = None) -> list[dict]:
    """Return one row per variant of the sweep in `folder`, in launch order; each failed run has its own row.

    Args:
        folder: the sweep's folder, with one folder per job in it.
        since: seconds since the epoch. Jobs that ended earlier belong to another sweep and are left out.
        record: the rounds in which the variants were timed, see vitkernels.sweep.rounds.run_rounds.

    Keys of a row: variant, status ("done" or "failed"), reason, step_time_ms {median, p10, p90, mean, n},
    images_per_step, images_per_s and mfu (0 to 1) at the median step, the mean parts of a step (input_wait_ms,
    host_late_ms, device_busy_ms, rest_ms), peak_memory_bytes, bytes (of the weights, for evaluations), train_loss,
    val_top1, commit, folder, finished (UTC), interpreted (what interpreted its kernels) and others of a run's summary;
    repeats (the rows of runs that differ only in their seed, or None for a single run; the other figures then describe
    all of them, see statistics.merge_repeats); and the keys that judgement.judge adds. A figure that is unknown, or a
    ratio of runs that cannot be compared, is None.
    """
    files = [path for path in folder.rglob("job.json") if path.stat().st_mtime >= since]
    jobs = [(job, path.parent) for path in files if (job := read_json(path)) is not None]
    jobs.sort(key=lambda pair: (pair[0]["num"], pair[0]["variant"]))
    rows = merge_repeats([_row(job, path, str(path.relative_to(folder))) for job, path in jobs])
    judge(rows, record)
    return rows


def compare_existing(folders: Sequence[Path]) -> list[dict]:
    """Return the rows of finished runs, in this order; they did not run in turns, so no winner is declared.

    The folder of a sweep gives the rows of its verdict, rounds included.

    Raises UsageError: "compare.no_run" for a folder without a summary.json or eval.json, "compare.twice" for one that
    is given twice, "compare.single" for a single run.
    """
    if len(folders) == 1 and any(folders[0].rglob("job.json")) and not (folders[0] / "job.json").exists():
        return compare(folders[0], record=read_json(folders[0] / RECORD))
    if len(folders) == 1 and read_results(folders[0]):
        raise UsageError(f"{folders[0]} is one run; name at least two, or the folder of a sweep", code="compare.single")
    rows = []
    for number, folder in enumerate(folders):
        if folder.resolve() in [other.resolve() for other in folders[:number]]:
            raise UsageError(f"{folder} was given twice", code="compare.twice", folder=str(folder))
        results = read_results(folder)
        if not results:
            reason = "no such folder" if not folder.is_dir() else "it has neither summary.json nor eval.json"
            message = f"{folder} is not the folder of a run: {reason}. A run that is still training has no summary yet"
            raise UsageError(message, code="compare.no_run", folder=str(folder))
        job = {"num": number, "variant": str(folder), "overrides": [str(folder)], "reason": results.get("reason")}
        job["status"] = results.get("status", "done")
        rows.append(_row(job, folder, str(folder)))
    judge(rows, {"rounds": [], "failed": {}, "reason": "the runs were started separately"})
    return rows


def _row(job: dict, path: Path, name: str) -> dict:
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
        "folder": name,
        "finished": _finished(path),
        "interpreted": interpreters(results),
    }


def _finished(path: Path) -> str | None:
    files = [path / name for name in ("summary.json", "eval.json") if (path / name).exists()]
    if not files:
        return None
    return datetime.fromtimestamp(files[0].stat().st_mtime, UTC).isoformat(timespec="seconds")


def _at_the_median_step(figures: dict, images: int | None) -> dict:
    """Return throughput and MFU at the median step.

    A summary has them at the mean step. A row uses one measure throughout, and a caveat reports stalls.
    """
    times = figures["step_time_ms"]
    if not times or not times["median"]:  # an evaluation, which reports its own throughput
        return {}
    mfu = figures["mfu"] and round(figures["mfu"] * times["mean"] / times["median"], 5)
    return {"images_per_s": images and round(images / times["median"] * 1e3, 2), "mfu": mfu}


def _legend(rows: list[dict]) -> str | None:
    if not any(row["ratio"] for row in rows):
        return None
    methods = {row["measured_by"] for row in rows} - {None, "runs"}
    legend = _SPEEDUP + (_IN_ROUNDS if "rounds" in methods else "")
    if any(row["ratio_interval"] for row in rows):
        legend += _INTERVAL.format(" or ".join(f"the {method}" for method in sorted(methods)))
    legend += "".join(f"; {text}" for mark, text in _MARKS.items() if any(row["judgement"] == mark for row in rows))
    return legend + (_REPEATS if any(row["repeats"] for row in rows) else "")


def _number(value: float | None, digits: int, half_range: float | None = None) -> str:
    spread = "" if half_range is None else f" ± {half_range:.{digits}f}"
    return _MISSING if value is None else f"{value:.{digits}f}{spread}"


def _speedup(row: dict) -> str:
    if row["ratio"] is None:
        return "interpreted" if row["interpreted"] else _MISSING
    text = _number(row["ratio"], 3)
    if row["ratio_interval"] is not None:
        low, high = row["ratio_interval"]
        text += f" ({low:.3f}, {high:.3f})"
    return text + (f" {_MARKS[row['judgement']][0]}" if row["judgement"] in _MARKS else "")


def _in_rounds(row: dict) -> str:
    return f"{median(row['rounds']['step_ms']):.2f}" if row["rounds"] else _MISSING


def _split(row: dict) -> str:
    """Return the parts of a step, or the input wait alone if the device cannot tell the others."""
    parts = [row[name] for name in PARTS]
    if None in parts:
        return _number(row["input_wait_ms"], 2)
    return " + ".join(_number(part, 2) for part in parts)


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
    """Return the table in Markdown, followed by its legend, failures, the verdict in sentences, and the caveats."""
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
    lines += [f"- **{sentence}**" for sentence in sentences(rows)]
    lines += [f"- {caveat}" for caveat in find_caveats(rows)]
    return "\n".join(lines) + "\n"


def show(rows: list[dict], folder: Path | None) -> None:
    """Print the table, the verdict and its caveats to the terminal; folder: where `write` put them, if it did."""
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
    for sentence in sentences(rows):
        console.print(f"- {sentence}", style="bold", markup=False)
    for caveat in find_caveats(rows):
        console.print(f"- {caveat}", style="dim", markup=False)
    if folder is not None:
        console.print(f"written to {folder}/comparison.{{md,json,png}}", markup=False, style="dim", soft_wrap=True)
