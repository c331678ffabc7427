"""Checks of a data set's settings, before the values meet code that would fail with a trace, or take them anyhow."""

import math
from typing import Any

from vitkernels.errors import UsageError


def check_number(
    name: str, value: Any, least: float = 0, greatest: float | None = None, *, whole: bool = False, null: bool = False
) -> None:
    """UsageError unless data.<name> is a number from least to greatest (None: no end), or None if null."""
    fits = _is_number(value) and (isinstance(value, int) or not whole)
    fits = fits and least <= value and (greatest is None or value <= greatest)
    if not fits and not (null and value is None):
        kind = "a whole number" if whole else "a number"
        span = f"of at least {least}" if greatest is None else f"from {least} to {greatest}"
        raise UsageError(f"data.{name}={value}: expected {kind} {span}{', or null' if null else ''}")


def check_range(name: str, value: Any) -> None:
    """UsageError unless data.<name> is [least, greatest], both above 0."""
    if not (is_numbers(value, 2) and 0 < value[0] <= value[1]):
        raise UsageError(f"data.{name}={shown(value)}: expected [least, greatest], both above 0")


def is_numbers(value: Any, count: int) -> bool:
    """Whether this is a list of so many finite numbers."""
    return isinstance(value, list | tuple) and len(value) == count and all(map(_is_number, value))


def shown(value: Any) -> Any:
    """A value as the command line takes it: a list in square brackets."""
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
