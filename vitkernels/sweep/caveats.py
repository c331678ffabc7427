"""Find the caveats that a reader of the verdict table must know, one sentence each."""

from statistics import geometric_mean

from vitkernels.sweep.judgement import MIN_STEPS_FOR_RATIO, fewest_timed_steps, incomparable, time_per_image
from vitkernels.sweep.statistics import median_step_times, ran_back_to_back, runs_of
from vitkernels.training.health import HOST_BOUND

_STALLED = 1.05  # mean step over median step
_CLOCK_RANGE = 0.1  # of the mean clock, from which a caveat reports it
_CONTRADICTS = 1.05  # factor beyond the rounds' interval from which a caveat reports the training runs' ratio


def find_caveats(rows: list[dict]) -> list[str]:
    """Return the caveats of a verdict table, the most serious ones first."""
    caveats = []
    for row in rows:
        if (reason := incomparable(rows[0], row)) is not None:
            caveats.append(f"{row['variant']}: no speedup, because {reason}")
    caveats += _few_steps(rows) + _stalls(rows) + _code_versions(rows)
    caveats += [f"{row['variant']}: {caveat}" for row in rows for caveat in _caveats_of_row(row)]
    return caveats + _rounds(rows) + _repeats(rows)


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


def _few_steps(rows: list[dict]) -> list[str]:
    enough = max(MIN_STEPS_FOR_RATIO, (fewest_timed_steps(rows[0]) or 0) / 2) if rows else 0
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
        too_few = f", a speedup needs {MIN_STEPS_FOR_RATIO}" if count < MIN_STEPS_FOR_RATIO else ""
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
    """Return how to learn more from a sweep whose rows were not timed in rounds."""
    by_runs = [row for row in rows if row["measured_by"] in ("runs", "repeats")]
    repeated = [row for row in by_runs if row["repeats"]]
    if not by_runs or len([row for row in rows if row["ratio"] is not None]) < 2:
        return []
    if not repeated:
        return [
            "each variant ran once, so a speedup may be noise; seed=0,1,2 as the first setting of the sweep repeats "
            "the variants in turn and adds confidence intervals"
        ]
    if all(ran_back_to_back(row) for row in repeated):
        return [
            "the repeats of each variant ran back to back, so a drift of the machine looks like a speedup; with seed "
            "as the first setting of the sweep, the variants take turns"
        ]
    return []


def _rounds(rows: list[dict]) -> list[str]:
    """Return the caveats of the rounds: disturbances, clocks, and training runs that contradict them."""
    timed = [row for row in rows if row["rounds"]]
    if len(timed) < 2:
        return []
    rounds, caveats = timed[0]["rounds"], []
    by_reason: dict[str, int] = {}
    for reasons in rounds["disturbed"]:
        for reason in reasons:
            by_reason[reason] = by_reason.get(reason, 0) + 1
    count = len(rounds["disturbed"])
    caveats += [f"in {n} of {count} rounds {reason}" for reason, n in by_reason.items()]
    for name in ("cpu_mhz", "gpu_mhz"):
        clocks = [mhz for row in timed for mhz in row["rounds"][name] if mhz]
        if clocks and max(clocks) - min(clocks) > _CLOCK_RANGE * geometric_mean(clocks):
            device = name[:3].upper()
            caveats.append(f"the {device}'s clock was {min(clocks):.0f} to {max(clocks):.0f} MHz over the rounds")
    return caveats + _contradictions(timed)


def _contradictions(timed: list[dict]) -> list[str]:
    """Return the rows whose training runs, which did not take turns, had another ratio than the rounds."""
    caveats, base_ms = [], time_per_image(timed[0])
    for row in timed[1:]:
        ms = time_per_image(row)
        if not base_ms or not ms or row["ratio"] is None:
            continue
        in_training, (low, high) = base_ms / ms, row["ratio_interval"] or (row["ratio"], row["ratio"])
        if not low / _CONTRADICTS < in_training < high * _CONTRADICTS:
            caveats.append(
                f"{row['variant']}: the step times of the training runs give {in_training:.3f} instead of "
                f"{row['ratio']:.3f}; the runs did not take turns, so the rounds decide"
            )
    return caveats
