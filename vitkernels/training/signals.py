"""Turn SIGTERM and SIGINT into a request to stop after the current step, so that a checkpoint can be written."""

import signal
from types import FrameType

from vitkernels.errors import EXIT_INTERRUPTED

__all__ = ["EXIT_INTERRUPTED", "StopRequest", "ignore_stops"]


def ignore_stops() -> None:
    """Let SIGTERM and SIGINT no longer end this process: it is about to exit by itself, with the right status."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class StopRequest:
    """A flag that SIGTERM and SIGINT set; true once a stop was requested. A second SIGINT stops immediately.

    A context manager: on exit the previous signal handlers are restored.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._handlers = {number: signal.signal(number, self._request) for number in (signal.SIGTERM, signal.SIGINT)}

    def _request(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> "StopRequest":
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal is not None
