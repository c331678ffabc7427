"""SIGTERM and SIGINT ask for a stop between steps, so that a checkpoint can be written first."""

import signal

from vitkernels.errors import EXIT_INTERRUPTED

__all__ = ["EXIT_INTERRUPTED", "StopRequest"]


class StopRequest:
    """True once a stop was asked for. A second SIGINT stops at once, as usual."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, frame) -> None:
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def release(self) -> None:
        """Give the signals back to whoever handled them before."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def __bool__(self) -> bool:
        return self.signal is not None
