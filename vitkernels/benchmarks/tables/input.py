"""The page on the input pipeline, from results/input.jsonl."""

import statistics

from vitkernels.benchmarks.tables import markdown

TITLE = "Input pipeline"
TIMM = "timm's create_loader"  # the peer of the loaders alone
FAKE = "training, data=fake"  # training that never waits for input
_SAME = ("device", "workers", "image", "batch_size", "image_size", "date", "commit", "settings")  # in all rows of a run
_INTRODUCTION = (
    "Images per second of three workloads: loaders alone, training on JPEG files, and evaluating a folder. Loaders are "
    "compared with timm's. Training uses this package's loaders and timm's, and is compared with training on "
    "`data=fake`, which needs no input. The files are generated. Each figure is the median of the rounds, with the "
    'minimum and the maximum. Within a round, the loaders take turns, and so do the training runs. "/ timm\'s loader" '
    'is the rate divided by that of timm\'s loader in the same run, so higher is faster; "/ data=fake" is the share of '
    "the rate of training without input in the same run. Figures "
    "compare only within their run, because hosts differ. In runs 1 and 2, batches that workers had prepared before a "
    "measurement were counted, so the rates of loaders alone are too high, and those of training on files may be. To "
    "measure a run: `python scripts/bench_input.py --train model=vit_b16_256 speed=max`."
)
_HEADINGS = ("pipeline", "images/s (least, greatest)", "rounds", "/ timm's loader", "/ data=fake")


def split_runs(rows: list[dict]) -> list[list[dict]]:
    """Return the rows of each run of scripts/bench_input.py, in which every pipeline appears once."""
    runs: list[list[dict]] = []
    for row in rows:
        same = runs and all(row.get(key) == runs[-1][0].get(key) for key in _SAME)
        if not same or row["pipeline"] in _rates(runs[-1]):
            runs.append([])
        runs[-1].append(row)
    return runs


def page(rows: list[dict]) -> str:
    """Return the page in Markdown."""
    sections = []
    for n, run in enumerate(split_runs(rows), start=1):
        first = run[0]
        width, height = first["image"]
        heading = f"Run {n}: files of {width} × {height}, {first['image_size']} px, batch {first['batch_size']}"
        sections.append((heading, f"{_conditions(first)}\n\n{markdown.table(_HEADINGS, _cells(run))}"))
    return markdown.page(TITLE, "input.jsonl", _INTRODUCTION, sections)


def _conditions(row: dict) -> str:
    machine = f"{row['device']}, {row['cores']} cores, {row['workers']} workers, torch {row['versions']['torch']}"
    settings = row.get("settings")  # of training; rows of early runs have none
    trained = f"training with `{' '.join(settings)}`; " if settings else ""
    return f"{machine}; {trained}{markdown.code(row)}."


def _cells(run: list[dict]) -> list[tuple[str, ...]]:
    rates = _rates(run)
    cells: list[tuple[str, ...]] = []
    for row in run:
        name, each = row["pipeline"], row["images_per_s"]
        shown = f"{rates[name]:.0f} ({min(each):.0f}, {max(each):.0f})"
        is_loader = not name.startswith(("training", "evaluation"))
        to_timm = rates[name] / rates[TIMM] if is_loader and TIMM in rates else None
        to_fake = 100 * rates[name] / rates[FAKE] if name.startswith("training") and FAKE in rates else None
        share = markdown.number(to_fake, 1) + ("" if to_fake is None else " %")
        cells.append((name, shown, str(len(each)), markdown.number(to_timm, 2), share))
    return cells


def _rates(run: list[dict]) -> dict[str, float]:
    return {row["pipeline"]: statistics.median(row["images_per_s"]) for row in run}
