"""The log of a run on the terminal."""

import logging
import sys


class TerminalLog(logging.StreamHandler):
    """Write errors to stderr, as the other commands do, and everything else to stdout."""

    def emit(self, record: logging.LogRecord) -> None:
        # Looked up for each record: a progress bar replaces both streams, to print lines above itself.
        self.stream = sys.stderr if record.levelno >= logging.ERROR else sys.stdout
        super().emit(record)
