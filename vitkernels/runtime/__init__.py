"""Devices that can train, cpu, cuda and xla, behind one interface."""

import logging

from vitkernels.errors import unknown_name
from vitkernels.runtime.base import Runtime

__all__ = ["Runtime", "create", "names"]

log = logging.getLogger(__name__)


def names() -> tuple[str, ...]:
    """Return the names that `create` accepts."""
    return ("auto", "cpu", "cuda", "xla")


def create(name: str = "auto", precision: str = "auto") -> Runtime:
    """Return the runtime of that name. "auto" selects a GPU if present, then a TPU, then the CPU, and logs the reasons.

    precision: "fp32", "bf16", "fp16" (cuda only), or "auto": fp32 on the CPU, otherwise bf16.

    Raises UsageError: "unknown_name" for an unknown name or precision, "runtime.unavailable" if the device or its
    library is missing, "runtime.precision" for a precision that the runtime does not support.
    """
    if name not in names():
        raise unknown_name("runtime", name, names())
    if name == "auto":
        name = _best_available()
    if name == "cuda":
        from vitkernels.runtime.cuda import CudaRuntime

        return CudaRuntime(precision)
    if name == "xla":
        from vitkernels.runtime.xla import XlaRuntime

        return XlaRuntime(precision)
    return Runtime(precision)


def _best_available() -> str:
    from vitkernels.runtime import cuda, xla

    def tpu_unavailable() -> str | None:
        return xla.unavailable() if xla.has_tpu() else "no TPU is attached"

    chosen, rejected = "cpu", ""
    for name, unavailable in (("cuda", cuda.unavailable), ("xla", tpu_unavailable)):
        reason = unavailable()
        if reason is None:
            chosen = name
            break
        rejected += f"; not {name}: {reason}"
    log.info("runtime: auto chose %s%s", chosen, rejected)
    return chosen
