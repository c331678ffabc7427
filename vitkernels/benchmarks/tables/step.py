"""The page on training step times, from results/step.jsonl."""

from typing import Any

from vitkernels.benchmarks.step import StepTimes, losses_table
from vitkernels.benchmarks.tables import markdown

TITLE = "Training step"
BASELINE = "timm compiled sdpa"  # first variant of each run of scripts/bench_step.py
_BEST = "`attn=auto ops=auto ops.residual_precision=bf16 ops.keep_activation=true`"
# (title, rows as (label, run, variant)).
_SUMMARY = (
    (
        "ViT-B/16 at 256 px, batch 128",
        (
            ("timm eager, unfused attention", 20, "timm eager native"),
            ("timm eager, SDPA", 20, "timm eager sdpa"),
            ("timm compiled, SDPA", 20, BASELINE),
            ("timm compiled, SDPA, repeated", 20, f"{BASELINE} again"),
            ("timm compiled with `max-autotune` (CUDA graphs)", 17, "timm compiled max-autotune"),
            ("`attn=auto ops=eager`, compiled like all rows below", 20, "attn=auto eager"),
            ("`attn=auto ops=fused`", 20, "attn=auto fused"),
            (_BEST, 20, "attn=auto best"),
            ("the same with `compile=reduce-overhead` (CUDA graphs)", 20, "attn=auto best reduce-overhead"),
            (
                "`python train.py` with the same settings, without CUDA graphs, gradient norm included",
                20,
                "train.py attn=auto ops=auto ops.residual_precision=bf16 ops.keep_activation=true",
            ),
        ),
    ),
    (
        "ViT-L/16 at 224 px, batch 128, compiled",
        (
            ("timm, SDPA", 21, BASELINE),
            ("timm, SDPA, repeated", 21, f"{BASELINE} again"),
            (_BEST, 21, "attn=auto best"),
        ),
    ),
)
_INTRODUCTION = (
    "Median step times in ms, with 10th and 90th percentile: forward, cross-entropy, backward and AdamW in bf16 "
    'autocast, on one random batch that stays on the device, in a bare loop. "time / timm" is the step time divided '
    "by that of timm's compiled model with SDPA in the same run, so lower is faster; compare only within a "
    "run, because machines differ. `eager` and `fused` are values of `ops`; `best` is `ops=auto "
    "ops.residual_precision=bf16 ops.keep_activation=true`. `train.py` rows run in a separate process. In runs 4 to "
    "21, the peak of every row of the bare loop but the first includes the first model's weights, which the benchmark "
    "then kept on the GPU. To measure a run: `python scripts/bench_step.py`."
)


def split_runs(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each run of scripts/bench_step.py, which begins with the baseline."""
    runs: list[list[dict]] = []
    for row in rows:
        same = runs and all(row[key] == runs[-1][0][key] for key in ("model", "date", "commit"))
        repeated = runs and row["variant"] == BASELINE and any(r["variant"] == BASELINE for r in runs[-1])
        if not same or repeated:
            runs.append([])
        runs[-1].append(row)
    return runs


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    runs = split_runs(rows)
    sections = [(title, _summary(runs, selected)) for title, selected in _SUMMARY]
    for n, run in enumerate(runs, start=1):
        first = run[0]
        device = f"{first['device']}, {first['precision']}, torch {first['versions']['torch']}"
        sections.append((f"Run {n}: {first['model']}, batch {first['batch_size']}", _run(run, device)))
    return markdown.page(TITLE, "step.jsonl", _INTRODUCTION, sections)


def _summary(runs: list[list[dict]], selected) -> str:
    cells = []
    for label, number, variant in selected:
        run = runs[number - 1]
        row = next(row for row in run if row["variant"] == variant)
        memory = markdown.gibibytes(row["peak_memory_bytes"])
        cells.append((label, str(number), markdown.percentiles(row), _ratio(run, row), memory))
    return markdown.table(("", "run", "step ms (p10, p90)", "time / timm", "peak GiB"), cells)


def _run(run: list[dict], device: str) -> str:
    cells = [
        (
            f"`{row['variant']}`",
            markdown.percentiles(row),
            str(row["n"]),
            f"{row['batch_size'] / row['median'] * 1e3:.0f}",
            _ratio(run, row),
            markdown.gibibytes(row["peak_memory_bytes"]),
            markdown.number(row["warmup_seconds"] or None, 0),  # 0.0: not measured,
        )
        for row in run
    ]
    headings = ("variant", "step ms (p10, p90)", "steps", "images/s", "time / timm", "peak GiB", "compile + warm-up s")
    parts = [f"{device}; {markdown.code(run[0])}.", markdown.table(headings, cells)]
    notes = dict.fromkeys(row["note"] for row in run if row.get("note"))
    parts += [f"Note: {note}." for note in notes]
    if losses := losses_table([_step_times(row) for row in run], BASELINE):
        parts += ["Losses of training from the same weights on the same images, against the baseline:", losses]
    return "\n\n".join(parts)


def _ratio(run: list[dict], row: dict) -> str:
    base = next((r["median"] for r in run if r["variant"] == BASELINE), None)
    return markdown.number(base and row["median"] / base, 3)


def _step_times(row: dict[str, Any]) -> StepTimes:
    known: dict[str, Any] = {name: row.get(name) for name in StepTimes.__dataclass_fields__}
    return StepTimes(**known)
