"""End a process at once at SIGTERM and SIGINT while the imports of a run take seconds. Import nothing slow here."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

_NUMBERS = (signal.SIGTERM, signal.SIGINT)


def end_at_signals() -> None:
    """End this process with status 75 at SIGTERM or SIGINT, until training handles these signals itself."""
    for number in _NUMBERS:
        signal.signal(number, _end)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Apply `end_at_signals` within this context; handlers that the code in it installs are kept."""
    before = {number: signal.getsignal(number) for number in _NUMBERS}
    end_at_signals()
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is _end:
                signal.signal(number, handler)


def _end(number: int, frame: object) -> None:
    os.write(1, f"interrupted by {signal.Signals(number).name}; resume=auto continues a run\n".encode())
    os._exit(75)  # errors.EXIT_INTERRUPTED
