"""SIGTERM and SIGINT ask for a stop between steps, so that a checkpoint can be written first."""

import signal

# The run was asked to stop, wrote a checkpoint, and can be continued (EX_TEMPFAIL of sysexits.h: try again).
EXIT_INTERRUPTED = 75


class StopRequest:
    """True once a stop was asked for. A second SIGINT stops at once, as usual."""

    def __init__(self):
        self.signal: signal.Signals | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame) -> None:
        self.signal = signal.Signals(number)
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __bool__(self) -> bool:
        return self.signal is not None
