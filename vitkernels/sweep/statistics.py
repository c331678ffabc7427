"""Merge runs that differ only in their seed into one row, and bound how far noise can move a ratio of step times."""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import zip_longest
from statistics import geometric_mean, mean, median

from vitkernels.training.step_timer import PARTS

LEVEL = 0.05  # largest share of sweeps in which noise may look like a difference

# Student's t, two-sided 95 %, for 1, 2, ... degrees of freedom. The last value serves all larger ones and is then
# slightly conservative.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
# Repeats must agree on these keys, and on all overrides except the seed.
_SAME_IN_REPEATS = ("device", "devices", "precision", "code")


def runs_of(row: dict) -> list[dict]:
    """Return the runs that a row stands for: its repeats, or the row itself."""
    return row["repeats"] or [row]


def merge_repeats(rows: list[dict]) -> list[dict]:
    """Return one row per variant, at the position of its first run; failed runs keep their own rows after it."""
    variants: dict[tuple, dict[tuple, list[dict]]] = {}
    for row in rows:
        overrides = tuple(word for word in row["overrides"] if not word.lstrip("+").startswith("seed="))
        failure = None if row["status"] == "done" else row["num"]  # a failed run is never merged with another
        key = (failure, *(row[name] for name in _SAME_IN_REPEATS))
        variants.setdefault(overrides, {}).setdefault(key, []).append(row)
    groups = []
    for by_key in variants.values():
        groups += sorted(by_key.values(), key=lambda group: group[0]["status"] != "done")
    return [_merged(group) if len(group) > 1 else group[0] for group in groups]


def _merged(rows: list[dict]) -> dict:
    """Return the row of several repeats.

    Step times are geometric means, because the interval of a ratio is computed from their logarithms. Losses and
    accuracies are arithmetic means, with half their range alongside.
    """
    row = {**rows[0], "variant": f"{_without_seed(rows[0]['variant'])} ×{len(rows)}", "repeats": rows}
    for name in ("images_per_s", *PARTS, "host_bound", "mfu"):
        row[name] = _aggregate(rows, name, median)
    for name in ("peak_memory_bytes", "bytes", "parameters_without_gradient"):
        row[name] = _aggregate(rows, name, max)
    for name in ("train_loss", "val_top1"):
        row[name] = _aggregate(rows, name, mean)
        row[f"{name}_half_range"] = _aggregate(rows, name, lambda values: (max(values) - min(values)) / 2)
    timed = [run for run in rows if median_step_times(run)]
    if timed:
        times = [run["step_time_ms"] for run in timed]
        merged = {name: geometric_mean(t[name] for t in times) for name in ("median", "p10", "p90", "mean")}
        row["step_time_ms"] = {**merged, "n": sum(t["n"] for t in times)}
        # The throughput of the merged step time. A mean of the runs' throughputs would be a different measure.
        first_median = median_step_times(timed[0])[0]
        for name in ("images_per_s", "mfu"):
            row[name] = timed[0][name] and timed[0][name] * first_median / merged["median"]
    return row


def _aggregate(rows: list[dict], name: str, function: Callable[[Iterable[float]], float]) -> float | None:
    values = [row[name] for row in rows if row[name] is not None]
    return function(values) if values else None


def _without_seed(variant: str) -> str:
    return re.sub(r"(^|,)\+*seed=[^,]*", "", variant).strip(",") or "seed"


def median_step_times(row: dict) -> list[float]:
    """Return the median step time of each of the row's runs that timed any step, in ms."""
    times = [run["step_time_ms"] for run in runs_of(row)]
    return [t["median"] for t in times if t and t["median"]]


def ratio_interval(ratio: float, base: dict, row: dict) -> list[float] | None:
    """Return the 95 % confidence interval of a ratio of two rows' step times, or None if neither was repeated.

    Student's t interval for the difference of two means of log step times, with pooled variance.
    """
    log_times = [[math.log(x) for x in median_step_times(one)] for one in (base, row)]
    freedom = sum(map(len, log_times)) - 2
    if freedom < 1:
        return None
    variance = sum((x - mean(logs)) ** 2 for logs in log_times for x in logs) / freedom
    t = _T95[min(freedom, len(_T95)) - 1]
    half = t * math.sqrt(variance * sum(1 / len(logs) for logs in log_times))
    return [round(ratio * math.exp(-half), 4), round(ratio * math.exp(half), 4)]


def ran_back_to_back(row: dict) -> bool:
    """Return whether the repeats of a row ran one after another, with no other variant between them."""
    numbers = [run["num"] for run in row["repeats"]]
    return max(numbers) - min(numbers) == len(numbers) - 1


# ---- rounds in which the variants take turns


def rounds_needed(comparisons: int, level: float = LEVEL) -> int:
    """Return the fewest rounds that allow an interval: n with 2 / 2^n <= level / comparisons.

    With fewer, rounds that agree by chance are more probable than `level`: all of 5 do so in 6 % of the sweeps.
    """
    return math.ceil(math.log2(2 * max(1, comparisons) / level))


def round_ratio(logs: Sequence[float], comparisons: int = 1, level: float = LEVEL) -> tuple[float, float, float] | None:
    """Return (ratio, low, high) of log ratios, one per round; None if there are too few rounds for an interval.

    The ratio is the Hodges-Lehmann estimate, and the interval that of Wilcoxon's signed-rank test (Hodges and Lehmann
    1963, doi 10.1214/aoms/1177704172). Its coverage, at least 1 - level over all `comparisons` together (Bonferroni),
    needs only that the log ratio of a round is symmetric. The random order of turns and the fresh processes make it so
    for two copies of one variant, whatever the machine does and however strongly neighbouring rounds depend on each
    other.
    """
    n = len(logs)
    if n < rounds_needed(comparisons, level):
        return None
    averages = sorted((logs[i] + logs[j]) / 2 for i in range(n) for j in range(i, n))
    outside = _averages_outside(n, level / max(1, comparisons) / 2)
    low, high = averages[outside], averages[len(averages) - 1 - outside]
    return math.exp(median(averages)), math.exp(low), math.exp(high)


@cache
def _averages_outside(n: int, tail: float) -> int:
    """Return how many of the smallest averages lie outside the interval: the largest k with P(W <= k) <= tail.

    W is the sum of the ranks of n positive differences under the null hypothesis.
    """
    counts = [1]  # counts[w]: sets of the ranks 1 to n whose sum is w
    for rank in range(1, n + 1):
        counts = [a + b for a, b in zip_longest(counts, [0] * rank + counts, fillvalue=0)]
    total = k = 0
    while total + counts[k] <= tail * 2**n:
        total += counts[k]
        k += 1
    return k - 1
