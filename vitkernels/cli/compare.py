"""`vitkernels compare RUN RUN ...`: the verdict table of finished runs."""

import argparse
import sys
from pathlib import Path

from vitkernels.errors import UsageError


def main(words: list[str]) -> int:
    """Print the verdict of these runs, and with --out write it; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vitkernels compare",
        description="Compare finished runs relative to the first. They did not run in turns, so the table shows ratios "
        "and declares no winner. Given the folder of a sweep, show its verdict again.",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, or of a sweep")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write comparison.json, .md and .png to this folder")
    options = parser.parse_args(words)
    from vitkernels.sweep import verdict

    try:
        rows = verdict.compare_existing(options.runs)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            verdict.write(rows, options.out)
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: could not write the comparison: {error}; choose another folder with --out", file=sys.stderr)
        return 2
    verdict.show(rows, options.out)
    return 0
