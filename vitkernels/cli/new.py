"""`vitkernels new DIR`: start a project with its own data set, attention backend, configuration and tests."""

import argparse
import shutil
import sys
from pathlib import Path

TEMPLATE = Path(__file__).with_name("project")


def main(words: list[str]) -> int:
    """Copy the project template into a new or empty folder; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="vitkernels new",
        description="Start a project: a data set, an attention backend, their configuration and tests. All of it runs.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="new or empty folder")
    folder = parser.parse_args(words).folder
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            print(f"error: {folder} is not an empty folder; choose another", file=sys.stderr)
            return 2
        shutil.copytree(TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
    except OSError as error:
        print(f"error: could not write the project to {folder}: {error}", file=sys.stderr)
        return 2
    print(f"wrote {folder}: mine/data.py, mine/attention.py, conf/ and tests/\nnext:")
    print(f"  cd {folder}\n  pytest\n  vitkernels train --config-dir=conf data=mine attn=mine")
    return 0
