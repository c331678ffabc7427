"""Choose which variants of a sweep can be timed in rounds, time them, and keep the record in rounds.json."""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vitkernels.files import read_json, write_json
from vitkernels.sweep.judgement import incomparable
from vitkernels.sweep.rounds import NO_ROUNDS, Variant, time_in_rounds
from vitkernels.sweep.statistics import rounds_needed, runs_of

log = logging.getLogger(__name__)

RECORD = "rounds.json"
MOST_VARIANTS = 8  # with sweep.rounds=auto; a round takes as many processes at once
_SPARE_ROUNDS = 2  # in addition to the fewest possible, all of which would have to agree
# Settings that change what a step computes, and not how long it takes.
_NO_EFFECT_ON_STEPS = (
    "seed", "optim.lr", "optim.weight_decay", "optim.layer_decay", "schedule", "trainer.max_epochs",
    "trainer.max_steps", "trainer.label_smoothing", "trainer.log_every", "trainer.eval_every", "ema.decay",
    "checkpoints",
)  # fmt: skip
_NOT_SETTINGS = ("code", "versions", "tuned")  # entries of a job's circumstances


def time_variants(
    folder: Path, rows: Sequence[dict], rounds: int | str | None, launcher: str, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Time the sweep's variants in rounds; return the record that verdict.compare takes, also written to rounds.json.

    A record of the same runs is reused. Each round is written when it ends, and an interrupted sweep continues after
    the last one. If no rounds can run, the record has none, and "reason" says why.

    Args:
        folder: of the sweep.
        rows: as verdict.compare returns them.
        rounds: sweep.rounds: a number, "auto", or None for no rounds.
        launcher: the import path of the sweep's launcher.
        environment: variables for the processes: GPU and compiler caches.
    """
    variants, failed = _candidates(folder, rows)
    reason = _why_not(folder, rows, variants, rounds, launcher)
    of = {variant.name: next(row["finished"] for row in rows if row["variant"] == variant.name) for variant in variants}
    before = read_json(folder / RECORD)
    earlier: Mapping[str, Any] = NO_ROUNDS
    if reason is None and before and before.get("of") == of and before["rounds"]:
        if not before.get("is_interrupted"):
            log.info("reusing the rounds of %s", folder / RECORD)
            return before
        log.info("continuing after %d rounds of %s", len(before["rounds"]), folder / RECORD)
        earlier = before | {"failed": {name: why for name, why in before["failed"].items() if name not in failed}}

    def write(record: Mapping[str, Any], **marks: bool) -> dict[str, Any]:
        whole = {**record, "failed": failed | record["failed"], "reason": reason, "of": of, **marks}
        write_json(folder / RECORD, whole)
        return whole

    if reason is not None:
        return write(NO_ROUNDS)
    count = rounds_needed(len(variants) - 1) + _SPARE_ROUNDS if rounds == "auto" else int(rounds or 0)
    record = time_in_rounds(variants, count, environment, earlier, partial(write, is_interrupted=True))
    for name, why in record["failed"].items():
        log.warning("%s could not be timed in rounds: %s", name, why)
    return write(record)


def _candidates(folder: Path, rows: Sequence[dict]) -> tuple[list[Variant], dict[str, str]]:
    """Return the variants that can be timed, the first row's first, and why the others cannot."""
    variants, failed = [], {}
    for row in rows:
        if row["status"] != "done":
            continue
        settings = settings_of(folder, row)
        reason = _unfit(rows[0], row, settings)
        if reason is None and settings is not None:
            log_file = folder / runs_of(row)[0]["folder"] / "rounds.log"
            variants.append(Variant(row["variant"], settings, log_file, row["device"]))
        else:
            failed[row["variant"]] = str(reason)
    return variants, failed


def settings_of(folder: Path, row: dict) -> dict[str, Any] | None:
    """Return all settings of the row's first run, None if its job.json lacks them."""
    job = read_json(folder / runs_of(row)[0]["folder"] / "job.json") or {}
    circumstances = job.get("circumstances")
    if not circumstances:
        return None
    return {key: value for key, value in circumstances.items() if key not in _NOT_SETTINGS}


def _unfit(base: dict, row: dict, settings: dict[str, Any] | None) -> str | None:
    if row["step_time_ms"] is None:
        return "an evaluation has no steps"
    if settings is None:
        return "its settings are unknown"
    if row["interpreted"]:
        return f"its kernels ran interpreted ({', '.join(row['interpreted'])})"
    if row["devices"] not in (None, 1):
        return f"it trains on {row['devices']} devices"
    if row["runtime"] == "xla":
        return "a TPU belongs to one process at a time"
    return incomparable(base, row)


def _why_not(
    folder: Path, rows: Sequence[dict], variants: Sequence[Variant], rounds: int | str | None, launcher: str
) -> str | None:
    if not rounds:
        return "sweep.rounds=null"
    if len(variants) < 2 or variants[0].name != rows[0]["variant"]:
        return "the first variant cannot be timed in turns, or no other one can"
    if "slurm" in launcher.lower():
        return "the jobs ran on a cluster's nodes"
    if rounds != "auto":
        return None
    if len(variants) > MOST_VARIANTS:
        return f"sweep.rounds=auto times up to {MOST_VARIANTS} variants, these are {len(variants)}"
    if not any(_may_change_speed(variants[0].settings, variant.settings) for variant in variants[1:]):
        return "the variants differ only in settings that do not change a step's time"
    return None


def _may_change_speed(base: Mapping[str, Any], other: Mapping[str, Any], prefix: str = "") -> bool:
    for key in {*base, *other}:
        a, b, name = base.get(key), other.get(key), f"{prefix}{key}"
        if a == b or name in _NO_EFFECT_ON_STEPS:
            continue
        if not isinstance(a, dict) or not isinstance(b, dict) or _may_change_speed(a, b, f"{name}."):
            return True
    return False
