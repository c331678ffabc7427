"""Record which interpreters ran kernels in this process: their times say nothing about a kernel's speed."""

import logging

log = logging.getLogger("vitkernels")

TRITON, PALLAS = "Triton's interpreter", "Pallas interpret mode"
_used: set[str] = set()


def note(interpreter: str) -> None:
    """Record that `interpreter` (TRITON or PALLAS) runs a kernel; the first time, warn."""
    if interpreter not in _used:
        _used.add(interpreter)
        log.warning(
            "%s runs kernels on the CPU: results are correct, but times say nothing about the kernels' speed",
            interpreter,
        )


def used() -> list[str]:
    """Return the interpreters that ran kernels in this process so far, sorted."""
    return sorted(_used)
