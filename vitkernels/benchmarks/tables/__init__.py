"""Build Markdown pages from the measurements in results/*.jsonl; one module per file. No figure is copied by hand.

Each module has `page(rows) -> str`: first a summary of selected rows, then every run in the file. Summaries select rows
by the number of their run, which never changes because results files are append-only.
"""

import importlib
import json
from pathlib import Path

NAMES = ("step", "input", "attention", "scaling", "quant", "paged_attention", "tpu_attention", "tpu_step", "speedrun")


def read_rows(path: Path) -> list[dict]:
    """Return the rows of a results file, one JSON object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_pages(results: Path, folder: Path) -> list[Path]:
    """Write a page per results file and an index to `folder`; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    origin = "Generated from results/*.jsonl by `python scripts/docs_benchmarks.py`; do not edit."
    lines = ["# Benchmarks", "", origin, ""]
    for name in NAMES:
        module = importlib.import_module(f"{__name__}.{name}")
        path = folder / f"{name}.md"
        path.write_text(module.page(read_rows(results / f"{name}.jsonl")))
        written.append(path)
        lines.append(f"- [{module.TITLE}]({path.name})")
    index = folder / "index.md"
    index.write_text("\n".join(lines) + "\n")
    return [*written, index]
