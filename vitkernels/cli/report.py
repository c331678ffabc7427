"""`vitkernels report RUN`: one HTML page about a run."""

import argparse
import sys
from pathlib import Path

from vitkernels.errors import UsageError


def main(words: list[str]) -> int:
    """Write the page and print its path; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vitkernels report",
        description="Write a page about a run, in one file: curves, results, settings and the command that repeats it.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="file to write; default: RUN/report.html")
    options = parser.parse_args(words)
    from vitkernels.training.report import write_report

    try:
        print(write_report(options.run, options.out))
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: could not write the page: {error}; choose another file with --out", file=sys.stderr)
        return 2
    return 0
