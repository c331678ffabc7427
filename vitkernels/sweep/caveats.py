"""Find the caveats that a reader of the verdict table must know, one sentence each."""

from vitkernels.sweep.statistics import median_step_times, runs_of
from vitkernels.training.health import HOST_BOUND

MIN_STEPS_FOR_RATIO = 5
_FEW_STEPS = 20
_STALLED = 1.05  # mean step over median step
# Two rows must agree on these for the ratio of their times to compare kernels: (key of a row, name in a message).
_COMPARABLE = (
    ("model", "the model"),
    ("flops_per_image", "the work per image"),
    ("device", "the device"),
    ("devices", "the number of devices"),
    ("precision", "the precision"),
)


def find_caveats(rows: list[dict]) -> list[str]:
    """Return the caveats of a verdict table, the most serious ones first."""
    caveats = []
    for row in rows:
        if (reason := incomparable(rows[0], row)) is not None:
            caveats.append(f"{row['variant']}: no speedup, because {reason}")
    caveats += _few_steps(rows) + _stalls(rows) + _code_versions(rows)
    caveats += [f"{row['variant']}: {caveat}" for row in rows for caveat in _caveats_of_row(row)]
    return caveats + _repeats(rows)


def _caveats_of_row(row: dict) -> list[str]:
    """Return the caveats that depend on no other row."""
    caveats = []
    if row["mfu"] is not None and row["quant"] in ("fp8", "int8"):
        caveats.append(f"MFU is relative to the {row['precision']} peak; the chip's 8-bit peak is higher")
    if (row["host_bound"] or 0) > HOST_BOUND:
        share = f"{100 * row['host_bound']:.0f} %"
        caveats.append(
            f"host-bound in {share} of the steps: the device waited for kernel launches, and step times show it"
        )
    if row["parameters_without_gradient"]:
        caveats.append(f"{row['parameters_without_gradient']} parameters received no gradient")
    return caveats


def incomparable(base: dict, row: dict) -> str | None:
    """Return why the ratio of two rows' times would not compare kernels, or None if it would."""
    if not median_step_times(row) or not median_step_times(base):  # there is no ratio in any case
        return None
    for key, name in _COMPARABLE:
        value, base_value = row[key], base[key]
        if value != base_value and not _nearly_equal(value, base_value):
            return f"{name} is {_format(key, value)} here and {_format(key, base_value)} in {base['variant']}"
    return None


def _nearly_equal(a, b) -> bool:
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b)


def _format(key: str, value) -> str:
    return f"{value / 1e9:.4g} GFLOP" if key == "flops_per_image" and value else str(value)


def fewest_timed_steps(row: dict) -> int | None:
    """Return the number of timed steps of the row's shortest timed run, or None if no run timed a step."""
    counts = [run["step_time_ms"]["n"] for run in runs_of(row) if run["step_time_ms"]]
    return min(filter(None, counts), default=None)


def _few_steps(rows: list[dict]) -> list[str]:
    enough = max(_FEW_STEPS, (fewest_timed_steps(rows[0]) or 0) / 2) if rows else 0
    by_count: dict[float, list[str]] = {}
    for run in (run for row in rows for run in runs_of(row)):
        steps = fewest_timed_steps(run) or enough
        if steps < enough:
            by_count.setdefault(steps, []).append(run["variant"])
    # The table itself shows a row in which no run timed a step.
    untimed = [
        run["variant"] for row in rows if median_step_times(row) for run in runs_of(row) if not median_step_times(run)
    ]
    caveats = [f"{', '.join(untimed)}: no step was timed"] if untimed else []
    for count, variants in sorted(by_count.items()):
        too_few = ", too few for a speedup" if count < MIN_STEPS_FOR_RATIO else ""
        caveats.append(f"{', '.join(variants)}: only {count} timed step{'s' * (count > 1)}{too_few}")
    return caveats


def _stalls(rows: list[dict]) -> list[str]:
    caveats = []
    for run in (run for row in rows for run in runs_of(row)):
        times = run["step_time_ms"]
        if times and times["n"] and times["mean"] > _STALLED * times["median"]:
            mean, above = times["mean"], 100 * (times["mean"] / times["median"] - 1)
            cause = "some steps stalled (checkpoints, input or another process)"
            caveats.append(f"{run['variant']}: mean step {mean:.1f} ms, {above:.0f} % above the median: {cause}")
    return caveats


def _code_versions(rows: list[dict]) -> list[str]:
    """Return the commits of the rows, unless all ran the same committed code."""
    by_code: dict[str, list[dict]] = {}
    for row in rows:
        if row["commit"]:
            by_code.setdefault(row["code"], []).append(row)
    commits = dict.fromkeys(row["commit"] for same in by_code.values() for row in same)
    if len(by_code) > 1 and len(commits) > 1:
        states = [f"{', '.join(r['variant'] for r in same)} at commit {same[0]['commit']}" for same in by_code.values()]
        return [f"the variants ran different code: {'; '.join(states)}"]
    return [f"measured with uncommitted changes: {commit}" for commit in commits if "-dirty" in commit]


def _repeats(rows: list[dict]) -> list[str]:
    """Return how far the ratios can be trusted, given the repeats and their order."""
    compared = [row for row in rows if row["ratio"] is not None]
    repeated = [row for row in compared if row["repeats"]]
    if len(compared) < 2:
        return []
    if not repeated:
        return [
            "each variant ran once, so a speedup may be noise; seed=0,1,2 as the first setting of the sweep repeats "
            "the variants in turn and adds confidence intervals"
        ]
    if len(repeated) > 1 and all(_ran_back_to_back(row) for row in repeated):
        return [
            "the repeats of each variant ran back to back, so a drift of the machine looks like a speedup; with seed "
            "as the first setting of the sweep, the variants take turns"
        ]
    return []


def _ran_back_to_back(row: dict) -> bool:
    numbers = [run["num"] for run in row["repeats"]]
    return max(numbers) - min(numbers) == len(numbers) - 1
