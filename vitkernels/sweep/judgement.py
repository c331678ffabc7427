"""Decide which variants of a sweep are faster or slower than the first one, and say why others stay open."""

import math
from collections.abc import Iterable, Mapping
from statistics import fmean, median
from typing import Any

from vitkernels.runtime.machine import is_busy
from vitkernels.sweep.rounds import round_times
from vitkernels.sweep.statistics import (
    median_step_times,
    ran_back_to_back,
    ratio_interval,
    round_ratio,
    rounds_needed,
    runs_of,
)

MIN_STEPS_FOR_RATIO = 20  # with fewer, p10 and p90 rest on two steps or less, and one stall moves the median
# Two rows must agree on these for the ratio of their times to compare kernels: (key of a row, name in a message).
_COMPARABLE = (
    ("model", "the model"),
    ("flops_per_image", "the work per image"),
    ("device", "the device"),
    ("devices", "the number of devices"),
    ("precision", "the precision"),
)
# Interpreted on the CPU; older runs do not say it themselves.
_INTERPRETED_ON_CPU = {"triton_flash": "Triton's interpreter", "pallas_flash": "Pallas interpret mode"}


def judge(rows: list[dict], record: Mapping[str, Any] | None = None) -> None:
    """Add the judgement of each row, relative to the first.

    Keys: ratio, the first row's time per image over this one's, None if it would not compare kernels;
    ratio_interval; measured_by, "rounds", "repeats" or "runs"; judgement, "faster", "slower", "level" for an interval
    that includes 1, "open" if the measurement cannot tell, None for the first row and without a ratio; open_because;
    rounds, None or one value per round of step_ms, cpu_share, gpu_mhz, cpu_mhz, other_cores and disturbed, with the
    timed steps, and the number of quiet rounds and how many of them an interval needs.

    Args:
        record: what run_rounds returned, with "reason" if no rounds ran.
    """
    record = record or {"rounds": [], "failed": {}, "reason": None}
    compared = _compared(rows, record)
    for row in rows:
        nothing = dict.fromkeys(("ratio", "ratio_interval", "measured_by", "judgement", "open_because"))
        row.update(nothing | {"rounds": _rounds_of(row, record, compared)})
        if row is rows[0]:
            row["ratio"] = 1.0 if _can_have_ratio(row, row) else None
        elif row["rounds"] is not None and rows[0]["rounds"] is not None:
            row.update(_by_rounds(rows[0], row, compared))
        elif _can_have_ratio(rows[0], row):
            row.update(_by_runs(rows[0], row))
            row["open_because"] = _open(row, record)
            row["judgement"] = "open" if row["open_because"] else _against_one(row["ratio_interval"])


def _compared(rows: list[dict], record: Mapping[str, Any]) -> int:
    """Return how many rows the rounds compare with the first one."""
    timed = set().union(*(round_times(one) for one in record["rounds"])) if record["rounds"] else set()
    return sum(row["variant"] in timed for row in rows[1:])


def _rounds_of(row: dict, record: Mapping[str, Any], compared: int) -> dict | None:
    times = [round_times(one).get(row["variant"]) for one in record["rounds"]]
    if not times or None in times:  # it was not timed, or failed in a later round
        return None
    disturbed = [one["disturbed"] for one in record["rounds"]]
    turns = [[turn for turn in one["turns"] if turn["variant"] == row["variant"]] for one in record["rounds"]]
    return {
        "step_ms": [round(ms, 4) for ms in times if ms is not None],
        "steps": sum(turn["n"] for of_round in turns for turn in of_round),
        "cpu_share": [_mean(turn["cpu_share"] for turn in of_round) for of_round in turns],
        "gpu_mhz": [_mean((turn.get("gpu") or {}).get("sm_mhz") for turn in of_round) for of_round in turns],
        "cpu_mhz": [_mean(lap["cpu_mhz"] for lap in one["machine"]) for one in record["rounds"]],
        "other_cores": [_mean(lap["other_cores"] for lap in one["machine"]) for one in record["rounds"]],
        "disturbed": disturbed,
        "quiet": sum(not reasons for reasons in disturbed),
        "needed": rounds_needed(compared),
    }


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 3) if known else None


def _by_rounds(base: dict, row: dict, compared: int) -> dict:
    size = row["images_per_step"] / base["images_per_step"]
    pairs = zip(base["rounds"]["step_ms"], row["rounds"]["step_ms"], row["rounds"]["disturbed"], strict=True)
    logs = [(math.log(size * ours / theirs), not reasons) for ours, theirs, reasons in pairs]
    quiet = [value for value, undisturbed in logs if undisturbed]
    enough = len(quiet) >= row["rounds"]["needed"]
    used = quiet if enough else [value for value, _ in logs]
    found = round_ratio(used, compared)
    interval = None if found is None else [round(bound, 4) for bound in found[1:]]
    ratio = round(math.exp(median(used)) if found is None else found[0], 4)
    judged = {"ratio": ratio, "ratio_interval": interval, "measured_by": "rounds"}
    if enough and interval is not None:
        return {**judged, "judgement": _against_one(interval), "open_because": None}
    return {**judged, "judgement": "open", "open_because": _too_few_quiet(row["rounds"])}


def _too_few_quiet(rounds: dict) -> str:
    reasons = sorted({reason for of_round in rounds["disturbed"] for reason in of_round})
    cause = f": {'; '.join(reasons)}" if reasons else ""
    count = len(rounds["disturbed"])
    return f"{rounds['quiet']} of {count} rounds were undisturbed, {rounds['needed']} are needed{cause}"


def _by_runs(base: dict, row: dict) -> dict:
    base_time, time = time_per_image(base), time_per_image(row)
    assert base_time is not None and time is not None
    ratio = round(base_time / time, 4)
    interval = ratio_interval(ratio, base, row)
    return {"ratio": ratio, "ratio_interval": interval, "measured_by": "repeats" if interval else "runs"}


def _open(row: dict, record: Mapping[str, Any]) -> str | None:
    """Return why the times of training runs do not show which of two variants is faster; None if they do."""
    failed = record["failed"].get(row["variant"])
    not_in_turns = f"not timed in rounds ({failed or record.get('reason') or 'none ran'})"
    if row["ratio_interval"] is None:
        return f"{not_in_turns}, and each variant ran once"
    if row["repeats"] is None or ran_back_to_back(row):
        return f"{not_in_turns}, and the runs did not take turns"
    if any(run["machine"] and is_busy(run["machine"]) for run in runs_of(row)):
        return f"{not_in_turns}, and other processes used the CPU during its runs"
    return None


def _against_one(interval: list[float]) -> str:
    low, high = interval
    return "faster" if low > 1 else "slower" if high < 1 else "level"


def _can_have_ratio(base: dict, row: dict) -> bool:
    if not time_per_image(base) or not time_per_image(row) or incomparable(base, row):
        return False
    return all((fewest_timed_steps(one) or 0) >= MIN_STEPS_FOR_RATIO for one in (base, row))


def time_per_image(row: dict) -> float | None:
    """Return the row's median step time divided by its images per step, in ms."""
    ms = (row["step_time_ms"] or {}).get("median")
    return row["images_per_step"] and ms and ms / row["images_per_step"]


def incomparable(base: dict, row: dict) -> str | None:
    """Return why the ratio of two rows' times would not compare kernels, or None if it would."""
    if not median_step_times(row) or not median_step_times(base):  # there is no ratio in any case
        return None
    for one in (row, base):
        if one["interpreted"]:
            where = "here" if one is row else f"in {base['variant']}"
            return f"kernels ran interpreted {where} ({', '.join(one['interpreted'])}), which says nothing about speed"
    for key, name in _COMPARABLE:
        value, base_value = row[key], base[key]
        if value != base_value and not _nearly_equal(value, base_value):
            return f"{name} is {_format(key, value)} here and {_format(key, base_value)} in {base['variant']}"
    return None


def interpreters(results: Mapping[str, Any]) -> list[str]:
    """Return which interpreters ran kernels in a run, from its summary."""
    if "interpreted" in results or results.get("runtime") != "cpu":
        return list(results.get("interpreted") or ())
    of_ops = _INTERPRETED_ON_CPU["triton_flash"] if results.get("ops") == "fused" else None
    return sorted(filter(None, {of_ops, _INTERPRETED_ON_CPU.get(str(results.get("attn")))}))


def _nearly_equal(a: object, b: object) -> bool:
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b)


def _format(key: str, value: Any) -> str:
    return f"{value / 1e9:.4g} GFLOP" if key == "flops_per_image" and value else str(value)


def fewest_timed_steps(row: dict) -> int | None:
    """Return the number of timed steps of the row's shortest timed run, or None if no run timed a step."""
    counts = [run["step_time_ms"]["n"] for run in runs_of(row) if run["step_time_ms"]]
    return min(filter(None, counts), default=None)


def sentences(rows: list[dict]) -> list[str]:
    """Return the verdict in sentences: one per variant that is compared with the first."""
    base = rows[0]["variant"] if rows else ""
    found: list[str] = []
    opened: dict[str, list[str]] = {}
    for row in rows:
        if row["judgement"] == "open":
            opened.setdefault(row["open_because"], []).append(row["variant"])
        elif row["judgement"] is not None:
            low, high = row["ratio_interval"]
            how = f"{len(row['rounds']['step_ms'])} rounds" if row["measured_by"] == "rounds" else "repeats"
            figures = f"{row['ratio']:.3f} × its speed, {low:.3f} to {high:.3f} over {how}"
            word = {"faster": "faster than", "slower": "slower than", "level": "not distinguishable from"}
            found.append(f"{row['variant']} is {word[row['judgement']]} {base} ({figures})")
    for reason, names in opened.items():
        found.append(f"no winner between {base} and {', '.join(names)}: {reason}")
    return found
