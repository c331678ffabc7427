"""Check a data set's settings before the values reach code that would fail obscurely or accept them silently."""

import math
import os
from typing import Any

import torch

from vitkernels.errors import UsageError

WORKERS_PER_CORE = 8  # more would only compete for cores and memory
LEAST_WORKERS = 16  # allowed on any machine


def value_error(setting: str, value: Any, expected: str) -> UsageError:
    """Return the error for a setting with an unexpected value."""
    message = f"{setting}={as_list(value)}: expected {expected}"
    return UsageError(message, code="data.value", setting=setting, value=value)


def check_number(
    name: str, value: Any, least: float = 0, greatest: float | None = None, *, integer: bool = False, null: bool = False
) -> None:
    """Raise UsageError unless the value is a number from least to greatest (None: no limit), or None if `null`."""
    fits = _is_number(value) and (isinstance(value, int) or not integer)
    fits = fits and least <= value and (greatest is None or value <= greatest)
    if not fits and not (null and value is None):
        kind = "an integer" if integer else "a number"
        span = f"of at least {least}" if greatest is None else f"from {least} to {greatest}"
        raise value_error(name, value, f"{kind} {span}{', or null' if null else ''}")


def check_range(name: str, value: Any, limit: float | None = None) -> None:
    """Raise UsageError unless the value is [least, greatest], both above 0 and at most `limit` (None: no limit)."""
    if not (is_numbers(value, 2) and 0 < value[0] <= value[1] and (limit is None or value[1] <= limit)):
        most = "" if limit is None else f" and at most {limit}"
        raise value_error(name, value, f"[least, greatest], both above 0{most}, such as [0.8, 1.0]")


def check_common(batch_size: int, seed: int, pin_memory: bool, num_workers: int = 0) -> None:
    """Raise UsageError for values that are invalid for every data set."""
    if batch_size < 1:
        raise value_error("batch_size", batch_size, "at least 1")
    if seed < 0:
        raise value_error("seed", seed, "0 or more")
    cores = usable_cores()
    most = max(LEAST_WORKERS, WORKERS_PER_CORE * cores)
    if not 0 <= num_workers <= most:
        expected = f"at most {most} processes on {cores} cores for each split; one per core is a good start"
        raise value_error("num_workers", num_workers, expected)
    if pin_memory and not torch.cuda.is_available():
        message = "pin_memory=True needs an NVIDIA GPU, but torch finds none: use pin_memory=False"
        raise UsageError(message, code="data.pin_memory")


def usable_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_numbers(value: Any, count: int) -> bool:
    """Return whether the value is a list of `count` finite numbers."""
    return isinstance(value, list | tuple) and len(value) == count and all(map(_is_number, value))


def as_list(value: Any) -> Any:
    """Return a tuple as a list, the form of configuration files; any other value as it is."""
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
