"""What a reader of the verdict must know beside its figures: sentences for below the table."""

from vitkernels.sweep.statistics import medians, runs
from vitkernels.training.stragglers import HOST_BOUND

FEWEST_STEPS = 5  # for a ratio
_FEW_STEPS = 20
_STALLING = 1.05  # mean step over the median
# What two rows must share for a ratio of their times to be one of their kernels: (key of a row, what it is called).
_COMPARABLE = (
    ("model", "the model"),
    ("flops_per_image", "the model's work on an image"),
    ("device", "the device"),
    ("devices", "the number of devices"),
    ("precision", "the precision"),
)


def remarks(rows: list[dict]) -> list[str]:
    """In the order of what they take from the figures."""
    said = [f"{row['variant']}: no ratio, for {why}" for row in rows if (why := not_comparable(rows[0], row))]
    said += _few_steps(rows) + _stalls(rows) + _code(rows)
    said += [f"{row['variant']}: {remark}" for row in rows for remark in _own(row)]
    return said + _repeats(rows)


def _own(row: dict) -> list[str]:
    """What a row would need said beside no other."""
    said = []
    if row["mfu"] is not None and row["quant"] in ("fp8", "int8"):
        said.append(f"MFU is of {row['precision']}'s peak; the chip's for 8-bit products is higher")
    if (row["host_bound"] or 0) > HOST_BOUND:
        share = f"{100 * row['host_bound']:.0f} %"
        said.append(f"in {share} of the steps the device waited for the host to launch it: the time is the host's too")
    if row["parameters_without_gradient"]:
        said.append(f"{row['parameters_without_gradient']} parameters got no gradient")
    return said


def not_comparable(base: dict, row: dict) -> str | None:
    """Why a ratio of the two rows' times would not be one of their kernels; None if it would."""
    if not medians(row) or not medians(base):  # there is no ratio anyway
        return None
    for key, name in _COMPARABLE:
        here, there = row[key], base[key]
        if here != there and not _nearly(here, there):
            return f"{name} is {_said(key, here)} here and {_said(key, there)} in {base['variant']}"
    return None


def _nearly(a, b) -> bool:
    return isinstance(a, float) and isinstance(b, float) and abs(a - b) <= 1e-6 * abs(b)


def _said(key: str, value) -> str:
    return f"{value / 1e9:.4g} GFLOP" if key == "flops_per_image" and value else str(value)


def steps_of(row: dict) -> int | None:
    """How many steps the row's shortest run was timed over, of those that were timed; None where none was."""
    counts = [run["step_time_ms"]["n"] for run in runs(row) if run["step_time_ms"]]
    return min(filter(None, counts), default=None)


def _few_steps(rows: list[dict]) -> list[str]:
    enough = max(_FEW_STEPS, (steps_of(rows[0]) or 0) / 2) if rows else 0
    by_count: dict[int, list[str]] = {}
    for run in (run for row in rows for run in runs(row)):
        if (steps_of(run) or enough) < enough:
            by_count.setdefault(steps_of(run), []).append(run["variant"])
    untimed = [run["variant"] for row in rows if medians(row) for run in runs(row) if not medians(run)]
    said = [f"{', '.join(untimed)}: no step was timed"] if untimed else []  # of a whole row the table says so
    for count, names in sorted(by_count.items()):
        too_few = ", too few for a ratio" if count < FEWEST_STEPS else ""
        said.append(f"{', '.join(names)}: timed over {count} step{'s' * (count > 1)}{too_few}")
    return said


def _stalls(rows: list[dict]) -> list[str]:
    said = []
    for run in (run for row in rows for run in runs(row)):
        times = run["step_time_ms"]
        if times and times["n"] and times["mean"] > _STALLING * times["median"]:
            mean, above = times["mean"], 100 * (times["mean"] / times["median"] - 1)
            why = "it stalls now and then (checkpoints, input, another process)"
            said.append(f"{run['variant']}: mean step {mean:.1f} ms, {above:.0f} % above the median: {why}")
    return said


def _code(rows: list[dict]) -> list[str]:
    """Which code the rows are of, unless it is one of all of them, and committed."""
    by_code: dict[str, list[dict]] = {}
    for row in rows:
        if row["commit"]:
            by_code.setdefault(row["code"], []).append(row)
    commits = dict.fromkeys(row["commit"] for same in by_code.values() for row in same)
    if len(by_code) > 1 and len(commits) > 1:
        states = [f"{', '.join(r['variant'] for r in same)} at commit {same[0]['commit']}" for same in by_code.values()]
        return [f"not the same code: {'; '.join(states)}"]
    return [f"measured with uncommitted changes: {commit}" for commit in commits if "-dirty" in commit]


def _repeats(rows: list[dict]) -> list[str]:
    """How far the ratios can be trusted."""
    compared = [row for row in rows if row["ratio"] is not None]
    repeated = [row for row in compared if row["repeats"]]
    if len(compared) < 2:
        return []
    if not repeated:
        return [
            "each variant ran once, so a ratio may be noise: seed=0,1,2 as the sweep's first setting repeats them in "
            "turns and shows it"
        ]
    if len(repeated) > 1 and all(_one_after_another(row) for row in repeated):
        return [
            "each variant's repeats were launched one after another, and a drift of the machine looks like a "
            "difference: with seed as the sweep's first setting the variants take turns"
        ]
    return []


def _one_after_another(row: dict) -> bool:
    numbers = [run["num"] for run in row["repeats"]]
    return max(numbers) - min(numbers) == len(numbers) - 1
