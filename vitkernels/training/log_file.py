"""The log file of a run, which reports a full, failing or read-only disk in one line instead of tracebacks."""

import contextlib
import logging
import sys


class LogFile(logging.FileHandler):
    """Append to a file; report only the first line that cannot be written, on stdout."""

    def __init__(self, filename: str):
        # Delayed, so that a folder that is read-only does not stop the start; escapes for paths that are not UTF-8.
        super().__init__(filename, encoding="utf-8", errors="backslashreplace", delay=True)
        self._failing = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:  # from opening the file
            self._report(error)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._report(error)
        else:
            super().handleError(record)

    def _report(self, error: OSError) -> None:
        if not self._failing:
            with contextlib.suppress(OSError):  # stdout may be a file on the same disk
                print(f"the log is no longer written to {self.baseFilename}: {error.strerror or error}", flush=True)
        self._failing = True
