"""Where training runs: cpu, cuda or xla, each behind the same small set of methods."""

import logging

from vitkernels.errors import unknown_name
from vitkernels.runtime.base import Runtime

__all__ = ["Runtime", "create", "names"]

log = logging.getLogger(__name__)


def names() -> tuple[str, ...]:
    return ("auto", "cpu", "cuda", "xla")


def create(name: str = "auto", precision: str = "auto") -> Runtime:
    """The runtime of that name; `auto` takes a GPU where there is one, then a TPU, then the CPU, and logs why.

    Raises UsageError when the name is unknown, or when it cannot run here, with what would mend it.
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
        return xla.unavailable() if xla.has_tpu() else "no TPU is attached."

    chosen, passed_over = "cpu", ""
    for name, unavailable in (("cuda", cuda.unavailable), ("xla", tpu_unavailable)):
        reason = unavailable()
        if reason is None:
            chosen = name
            break
        passed_over += f"; not {name}: {reason}"
    log.info("runtime=auto chose %s%s", chosen, passed_over)
    return chosen
