"""Build Markdown tables and pages, and format measured values."""

from collections.abc import Iterable, Sequence

MISSING = "–"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(headings) + " |", "|---" * len(headings) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)])


def page(title: str, source: str, introduction: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a page: title, origin of the figures, introduction, and (heading, text) sections."""
    origin = f"Generated from results/{source} by `python scripts/docs_benchmarks.py`; do not edit."
    parts = [f"# {title}", origin, introduction]
    for heading, text in sections:
        parts += [f"## {heading}", text]
    return "\n\n".join(parts) + "\n"


def number(value: float | None, digits: int) -> str:
    return MISSING if value is None else f"{value:.{digits}f}"


def percentiles(times: dict, digits: int = 2) -> str:
    """Return "median (p10, p90)"."""
    return f"{times['median']:.{digits}f} ({times['p10']:.{digits}f}, {times['p90']:.{digits}f})"


def spread(timing: dict | None, digits: int = 3) -> str:
    """Return "median [20th, 80th percentile]", or only the median if no percentiles were recorded."""
    if timing is None:
        return MISSING
    if "low" not in timing:
        return f"{timing['median']:.{digits}f}"
    return f"{timing['median']:.{digits}f} [{timing['low']:.{digits}f}, {timing['high']:.{digits}f}]"


def gibibytes(size: int | None) -> str:
    return MISSING if size is None else f"{size / 2**30:.1f}"


def code(row: dict) -> str:
    """Return the date and, if recorded, the commit of a measurement."""
    return row["date"] + (f", commit {row['commit']}" if row.get("commit") else "")
