"""Variants that ran several times, differing by nothing but their seed: one row, and how far chance reaches."""

import math
import re
from statistics import geometric_mean, mean, median

# Student's t, two-sided at 95 %, for 1, 2, ... degrees of freedom; the last for all more, where it is a little wide.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
# What must be the same for runs to repeat each other, beside the words of the command line.
_SAME = ("device", "devices", "precision", "code")


def runs(row: dict) -> list[dict]:
    """The runs that a row is of: its repeats, or itself."""
    return row["repeats"] or [row]


def merge(rows: list[dict]) -> list[dict]:
    """One row for each variant, where its first run stood; below it failed runs, which keep rows of their own."""
    variants: dict[tuple, dict[tuple, list[dict]]] = {}
    for row in rows:
        words = tuple(word for word in row["overrides"] if not word.lstrip("+").startswith("seed="))
        failure = None if row["status"] == "done" else row["num"]
        variants.setdefault(words, {}).setdefault((failure, *(row[name] for name in _SAME)), []).append(row)
    groups = [
        group for of in variants.values() for group in sorted(of.values(), key=lambda g: g[0]["status"] != "done")
    ]
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _merged(rows: list[dict]) -> dict:
    """Step times are geometric means of the repeats' own, for a ratio's interval is by their logarithms; losses and
    accuracies are means with half of their range."""
    row = {**rows[0], "variant": f"{_without_seed(rows[0]['variant'])} ×{len(rows)}", "repeats": rows}
    for name in ("images_per_s", "input_wait_ms", "host_bound", "mfu"):
        row[name] = _of(rows, name, median)
    for name in ("peak_memory_bytes", "bytes", "parameters_without_gradient"):
        row[name] = _of(rows, name, max)
    for name in ("train_loss", "val_top1"):
        row[name] = _of(rows, name, mean)
        row[f"{name}_half_range"] = _of(rows, name, lambda values: (max(values) - min(values)) / 2)
    timed = [run for run in rows if medians(run)]
    if timed:
        times = [run["step_time_ms"] for run in timed]
        row["step_time_ms"] = {
            name: geometric_mean(t[name] for t in times) for name in ("median", "p10", "p90", "mean")
        }
        row["step_time_ms"]["n"] = sum(t["n"] for t in times)
        # The speed of that step, of which a mean of the speeds would be another measure.
        for name in ("images_per_s", "mfu"):
            row[name] = timed[0][name] and timed[0][name] * medians(timed[0])[0] / row["step_time_ms"]["median"]
    return row


def _of(rows: list[dict], name: str, of) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return of(values) if values else None


def _without_seed(variant: str) -> str:
    return re.sub(r"(^|,)\+*seed=[^,]*", "", variant).strip(",") or "seed"


def medians(row: dict) -> list[float]:
    """The median step of each run, ms."""
    times = [run["step_time_ms"] for run in runs(row)]
    return [t["median"] for t in times if t and t["median"]]


def ratio_interval(ratio: float, base: dict, row: dict) -> list[float] | None:
    """The 95 % confidence interval of a ratio of two rows' step times, from how repeats differ; None without any."""
    times = [[math.log(x) for x in medians(one)] for one in (base, row)]
    freedom = sum(map(len, times)) - 2
    if freedom < 1:
        return None
    variance = sum((x - mean(logs)) ** 2 for logs in times for x in logs) / freedom
    half = _T95[min(freedom, len(_T95)) - 1] * math.sqrt(variance * sum(1 / len(logs) for logs in times))
    return [round(ratio * math.exp(-half), 4), round(ratio * math.exp(half), 4)]


def told_apart(row: dict) -> bool:
    """Whether the row's ratio differs from 1 by more than chance, as far as repeats tell."""
    low, high = row["ratio_interval"] or (2, 2)
    return not low <= 1 <= high
