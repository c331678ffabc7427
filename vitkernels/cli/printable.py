"""Print paths that are not valid UTF-8."""

import io
import sys


def print_any_path() -> None:
    """Let stdout print the bytes of a path that are not UTF-8 as escapes; by default Python refuses such text."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
