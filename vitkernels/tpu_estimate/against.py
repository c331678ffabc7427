"""Compare the step times that a run recorded on a TPU with the estimate for its configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vitkernels.errors import UsageError
from vitkernels.tpu_estimate.chips import CHIPS, Chip

# Settings that determine the step, by group of config.json; the others (data set, schedule, files) do not affect its
# time.
_GROUPS: dict[str, tuple[str, ...]] = {
    "trainer": ("accum_steps", "clip_grad", "label_smoothing", "loss", "bce_threshold"),
    "ema": ("decay",),
    "model": ("name", "img_size", "in_chans", "drop_path_rate"),
    "data": ("batch_size",),
    "optim": ("opt", "lr", "weight_decay", "layer_decay"),
    "runtime": ("precision",),
}


@dataclass(frozen=True)
class RealRun:
    """The step times and settings of a run on a TPU."""

    folder: Path
    chip: Chip
    devices: int
    parallel: str
    step_ms: dict[str, float]  # median, p10, p90, mean, n
    overrides: list[str]  # the settings that its step depends on


def read(folder: Path) -> RealRun:
    """Read the folder of a run.

    Raises UsageError: tpu_estimate.no_run without summary.json and config.json, tpu_estimate.not_on_tpu for a run on
    another device or on a TPU that is not in chips.py, tpu_estimate.no_times if it timed no step.
    """
    summary, settings = (_json(folder / name) for name in ("summary.json", "config.json"))
    device = summary.get("device", "unknown")
    chip = CHIPS.get(str(device).removeprefix("TPU ").lower())
    if summary.get("runtime") != "xla" or not str(device).startswith("TPU") or chip is None:
        message = f"{folder} ran on {device} (runtime={summary.get('runtime')}), not on a TPU {', '.join(CHIPS)}"
        raise UsageError(message, code="tpu_estimate.not_on_tpu", device=device)
    times = summary.get("step_time_ms") or {}
    if not times.get("n"):
        message = f"{folder} timed no step: training was no longer than trainer.warmup_steps"
        raise UsageError(message, code="tpu_estimate.no_times", folder=str(folder))
    return RealRun(folder, chip, summary.get("devices", 1), summary.get("parallel", "none"), times, overrides(settings))


def _json(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read ({error}); give the folder of a finished run, with summary.json"
        raise UsageError(message, code="tpu_estimate.no_run", path=str(path)) from error


def overrides(settings: dict) -> list[str]:
    """Return the settings in a run's config.json that its step depends on, as command-line arguments."""
    words = [f"{group}={settings[group]['name']}" for group in ("attn", "quant") if group in settings]
    ops = settings.get("ops", {})
    words += [f"ops={ops['name']}"] if "name" in ops else []
    words += [f"ops.{name}={_word(value)}" for name, value in ops.items() if name != "name"]
    for group, names in _GROUPS.items():
        found = settings.get(group, {})
        words += [f"{group}.{name}={_word(found[name])}" for name in names if name in found]
    for group in ("model", "optim"):
        kwargs = settings.get(group, {}).get("kwargs", {})
        words += [f"+{group}.kwargs.{name}={_word(value)}" for name, value in kwargs.items()]
    classes = settings.get("data", {}).get("num_classes")
    return [*words, *([f"data.num_classes={classes}"] if classes else [])]


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def text(run: RealRun, found: dict, communication_ms: float | None) -> str:
    """Return the measured and estimated times of the run's step, as text for the terminal.

    Args:
        found: the estimate of its step on one chip, `step_report.document`.
        communication_ms: of its collectives if it ran on several chips; None if they cannot be estimated.
    """
    times, ms = run.step_ms, found["step"]["estimate_ms"]
    lines = [
        f"{run.folder}: {run.devices} × TPU {run.chip.name}, {found['batch']} images per chip and step",
        f"  measured  {times['median']:9.2f} ms  median of {times['n']} steps (p10 {times['p10']:.2f}, "
        f"p90 {times['p90']:.2f}, mean {times['mean']:.2f})",
        f"  ESTIMATE  {ms:9.2f} ms  one chip's computation; estimate / measured {ms / times['median']:.3f}",
    ]
    if run.devices > 1 and communication_ms is None:
        lines.append(
            f"  collectives of {run.devices} chips are not estimated: only slices of 4, 8 and 16 chips are supported"
        )
    elif communication_ms:
        total = ms + communication_ms
        ratio = total / times["median"]
        lines.append(f"  ESTIMATE  {total:9.2f} ms  with {communication_ms:.2f} ms of collectives; ratio {ratio:.3f}")
    lines.append("  The estimate leaves out input, dispatch, gaps between operations, mixing and augmentation.")
    return "\n".join(lines)
