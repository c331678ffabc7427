"""Compare the estimates of two training steps: where the difference in time comes from, by part and by operation.

Two compilations name the same operation differently (fusion.12, fusion.15). Kernels are therefore matched by part,
torch operation and the shape of the result.
"""

import json
import re
from pathlib import Path

from vitkernels.errors import UsageError


def read(path: Path) -> dict:
    """Return the document of a step that `vitkernels tpu-estimate step --json` wrote; raise UsageError for others."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}", code="tpu_estimate.report", path=str(path)) from error
    if not isinstance(found, dict) or not {"step", "kernels", "settings"} <= found.keys():
        message = f"{path} is not an estimate of a step; write one with: vitkernels tpu-estimate step ... --json FILE"
        raise UsageError(message, code="tpu_estimate.report", path=str(path))
    return found


def names(first: dict, second: dict) -> tuple[str, str]:
    """Return what distinguishes two steps: their chips if these differ, and the settings that only one of them has."""
    found = []
    for one, other in ((first, second), (second, first)):
        words = [one["chip"]] if one["chip"] != other["chip"] else []
        found.append(" ".join([*words, *(word for word in one["settings"] if word not in other["settings"])]) or "same")
    return found[0], found[1]


def text(first: dict, second: dict, limit: int = 12) -> str:
    """Return the comparison as a page: the steps, their parts, and the kernels that differ most."""
    one, other = names(first, second)
    times = [found["step"]["estimate_ms"] for found in (first, second)]
    digits = 2 if max(times) >= 10 else 4
    lines = [
        f"ESTIMATES, no TPU was used\n  A  {times[0]:9.{digits}f} ms  {one}\n  B  {times[1]:9.{digits}f} ms  {other}",
        f"  B takes {times[1] / times[0]:.3f} × the time of A: {times[1] - times[0]:+.{digits}f} ms",
        "",
        _table("part", _by_part(first), _by_part(second), 0, digits),
        "",
        _table("kernels: part, op, result", _by_kernel(first), _by_kernel(second), limit, digits),
    ]
    return "\n".join(lines)


def _by_part(found: dict) -> dict[str, tuple[float, int]]:
    parts: dict[str, tuple[float, int]] = {}
    for row in found["kernels"]:
        ms, runs = parts.get(row["part"], (0.0, 0))
        parts[row["part"]] = ms + row["estimate_ms_in_all"], runs + row["times_run"]
    return parts


def _by_kernel(found: dict) -> dict[str, tuple[float, int]]:
    kernels: dict[str, tuple[float, int]] = {}
    for row in found["kernels"]:
        shape = re.sub(r"\{[^{}]*\}", "", row["result"])
        name = ", ".join(part for part in (row["part"], row["op"], shape[:60]) if part)
        ms, runs = kernels.get(name, (0.0, 0))
        kernels[name] = ms + row["estimate_ms_in_all"], runs + row["times_run"]
    return kernels


def _table(what: str, first: dict, second: dict, limit: int, digits: int) -> str:
    """Return both sides as Markdown, the largest differences first; 0 shows all."""
    none = (0.0, 0)
    keys = sorted({*first, *second}, key=lambda key: -abs(second.get(key, none)[0] - first.get(key, none)[0]))
    lines = [f"| {what} | A ms | B ms | B − A ms | runs A, B |", "|---" * 5 + "|"]
    shown = keys[:limit] if limit else keys
    for key in shown:
        (a, runs), (b, others) = first.get(key, none), second.get(key, none)
        lines.append(f"| {key} | {a:.{digits}f} | {b:.{digits}f} | {b - a:+.{digits}f} | {runs}, {others} |")
    rest = [second.get(key, none)[0] - first.get(key, none)[0] for key in keys[len(shown) :]]
    if rest:
        lines.append(f"| {len(rest)} more | | | {sum(rest):+.{digits}f} | |")
    return "\n".join(lines)
