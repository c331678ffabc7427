"""The page on training with several GPUs, from results/scaling.jsonl."""

from vitkernels.benchmarks.tables import markdown

TITLE = "Scaling over GPUs"
# Rows of the summary: (label, run, position in the run).
_SUMMARY = (
    ("none", 9, 2),
    ("none; each GPU trains independently, all at once", 9, 1),
    ("ddp, send=copy", 9, 3),
    ("ddp, send=copy, repeated", 9, 6),
    ("ddp, send=nccl", 9, 4),
    ("fsdp", 9, 5),
    ("none", 7, 2),
    ("none; each GPU trains independently, all at once", 7, 1),
    ("ddp, send=nccl", 7, 5),
    ("fsdp", 7, 4),
    ("none, fused ops, CUDA graphs", 12, 2),
    ("none, fused ops, CUDA graphs; each GPU trains independently, all at once", 12, 1),
    ("ddp, send=copy, fused ops, CUDA graphs", 12, 3),
    ("ddp, send=copy, fused ops, CUDA graphs, repeated", 12, 6),
    ("ddp, send=nccl, fused ops, CUDA graphs", 12, 4),
    ("none, fused ops", 10, 2),
    ("none, fused ops; each GPU trains independently, all at once", 10, 1),
    ("ddp, send=nccl, fused ops", 10, 4),
    ("fsdp, fused ops", 10, 5),
    ("ddp, send=copy, fused ops", 10, 3),
    ("ddp, send=copy, fused ops, repeated", 10, 6),
)
_INTRODUCTION = (
    "Weak scaling of train.py on the GPUs of one host: the batch per GPU is constant, the data is synthetic, and "
    "input is never the bottleneck. Times are medians in ms with the 10th and 90th percentile. Efficiency is the "
    "step time of one GPU training alone, without any strategy, divided by that of the row in the same run. "
    '"Each GPU trains independently, all at once" shows how much the GPUs compete for power and host time. To measure '
    "a run: `python scripts/bench_scaling.py`."
)
_HEADINGS = ("parallel", "GPUs", "step ms (p10, p90)", "images/s", "efficiency")


def split_runs(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each run of scripts/bench_scaling.py, which begins with all GPUs at once."""
    runs: list[list[dict]] = []
    for row in rows:
        starts = row["parallel"] == "none" and row.get("alone") is False
        if not runs or starts or row["commit"] != runs[-1][0]["commit"]:
            runs.append([])
        runs[-1].append(row)
    return runs


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    runs = split_runs(rows)
    summary = [(label, runs[n - 1], runs[n - 1][position - 1]) for label, n, position in _SUMMARY]
    cells = [(str(n), *_cells(label, run, row)) for (label, run, row), (_, n, _) in zip(summary, _SUMMARY, strict=True)]
    sections = [("ViT-B/16 at 256 px, batch 128 per GPU", markdown.table(("run", *_HEADINGS), cells))]
    for n, run in enumerate(runs, start=1):
        first = run[0]
        device = f"{first['device']}, {first['precision']}, torch {first['versions']['torch']}"
        settings = f"`attn={first['attn']} ops={first['ops']}`, compile {str(first['compile']).lower()}"
        batch = f"batch {first['batch_size_per_device']} per GPU"
        text = f"{batch}; {settings}; {device}; {markdown.code(first)}."
        sections.append((f"Run {n}: {first['model']}", f"{text}\n\n{_run_table(run)}"))
    return markdown.page(TITLE, "scaling.jsonl", _INTRODUCTION, sections)


def _run_table(run: list[dict]) -> str:
    cells = []
    for row in run:
        mean, memory = f"{row['step_time_ms']['mean']:.2f}", markdown.gibibytes(row["peak_memory_bytes"])
        cells.append((*_cells(_label(row), run, row), mean, memory))
    return markdown.table((*_HEADINGS, "mean ms", "peak GiB per GPU"), cells)


def _label(row: dict) -> str:
    label = row["parallel"] + (f" ({row['variant']})" if row.get("variant") else "")
    return f"{label}; each GPU trains independently, all at once" if row.get("alone") is False else label


def _cells(label: str, run: list[dict], row: dict) -> tuple[str, ...]:
    times, images = row["step_time_ms"], row["devices"] * row["batch_size_per_device"]
    base = next(
        (r["step_time_ms"]["median"] for r in run if r["parallel"] == "none" and r.get("alone") is not False), None
    )
    medians = [times["median"]]
    shown = markdown.percentiles(times)
    if row.get("alone") is False and row.get("medians_ms"):
        medians = row["medians_ms"]
        shown = ", ".join(f"{median:.2f}" for median in medians)
    rates = ", ".join(f"{images / median * 1e3:.0f}" for median in medians)
    efficiencies = ", ".join(markdown.MISSING if base is None else f"{100 * base / median:.1f}" for median in medians)
    return label, str(row["devices"]), shown, rates, efficiencies + ("" if base is None else " %")
