"""Attention backends behind one contract: `attention.get("sdpa")(q, k, v)`.

To add one: a file in this folder that ends in `BACKEND = Mine()`, a line in `_MODULES`, a YAML in conf/attn/.
The conformance suite and the benchmarks pick it up by themselves.
"""

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from vitkernels.attention.contract import AttentionBackend, Problem
from vitkernels.errors import UsageError, unknown_name

__all__ = [
    "AttentionBackend",
    "Problem",
    "broken",
    "candidates",
    "choose",
    "choose_for_all",
    "get",
    "names",
    "unsupported",
]

log = logging.getLogger(__name__)

_MODULES = {
    "native": "vitkernels.attention.native",
    "sdpa": "vitkernels.attention.sdpa",
    "pallas_flash": "vitkernels.attention.pallas_flash",
    "triton_flash": "vitkernels.attention.triton_flash",
    "auto": "vitkernels.attention.auto",
}

# What `auto` tries, fastest first; the last entry takes every problem. Measured on CUDA, on an H200 at 14 shapes of 50
# to 4096 tokens (results/attention.jsonl; pallas_flash takes no other generation); on TPU by the estimate from the
# compiler's schedule, for no TPU was at hand. Kernels that would only be interpreted are not in the running.
_PREFERENCE = {
    "cpu": ("sdpa",),
    "cuda": ("pallas_flash", "triton_flash", "sdpa"),
    "tpu": ("pallas_flash", "sdpa"),
    "xla": ("sdpa",),
}


def names() -> tuple[str, ...]:
    """Every backend's name; `auto` chooses among the others."""
    return tuple(_MODULES)


def get(name: str) -> AttentionBackend:
    """The backend of that name; an unknown name raises a ValueError that lists the names."""
    if name not in _MODULES:
        raise unknown_name("attention backend", name, _MODULES)
    # torch.compile knows sys.modules as it was at its first look; of a package it sees what was imported since.
    package = sys.modules[__name__]
    if not hasattr(package, name):  # it cannot trace an import
        import_module(_MODULES[name])
    return getattr(package, name).BACKEND


_broken: dict[str, str | None] = {}  # asked once, for torch.compile cannot trace an import


def broken(name: str) -> str | None:
    """Why that backend's module cannot be imported, in the error's own words; None when it can.

    For who looks over all backends: one that is broken must not keep the others from working. `get` raises its error.
    """
    if name in _MODULES and name not in _broken:
        _broken[name] = None
        try:
            get(name)
        except Exception as error:  # a kernel in the making may fail in any way
            _broken[name] = f"{_MODULES[name]} cannot be imported: {type(error).__name__}: {error}"
    return _broken.get(name)


def unsupported(name: str, problem: Problem) -> str | None:
    """Why that backend does not take the problem; None when it does."""
    return broken(name) or get(name).unsupported(problem)


def candidates(device_type: str) -> tuple[str, ...]:
    """What `auto` tries on that device, fastest first; the last one takes every problem."""
    place = "tpu" if device_type == "xla" and _xla_is_tpu() else device_type
    return _PREFERENCE.get(place, ("native",))


def choose(problem: Problem) -> tuple[str, dict[str, str]]:
    """The fastest backend that takes the problem, and why each faster one was passed over."""
    refused = {}
    for name in candidates(problem.device_type):
        reason = unsupported(name, problem)
        if reason is None:
            return name, refused
        refused[name] = reason
    return "native", refused


def choose_for_all(name: str, problems: Sequence[Problem]) -> str:
    """The backend that takes all of a model's problems: the named one; for `auto` the fastest, and the log says why.

    Raises UsageError when the named one refuses one of them, with those that do not.
    """
    if name == "auto":
        chosen = dict(choose(problem) for problem in problems)
        name = next(iter(chosen)) if len(chosen) == 1 else "sdpa"  # which takes every problem
        why = "".join(f"; not {other}: {reason}" for r in chosen.values() for other, reason in r.items())
        log.info("attn=auto chose %s%s", name, why)
    for problem in problems:
        reason = get(name).unsupported(problem)
        if reason is not None:
            others = [n for n in names() if n not in (name, "auto")]
            takers = [n for n in others if unsupported(n, problem) is None]
            raise UsageError(f"attn={name} cannot run this model here: {reason}; these can: {', '.join(takers)}")
    return name


def _xla_is_tpu() -> bool:
    """Whether torch_xla's graphs are for a TPU, and not for the CPU that PJRT_DEVICE=CPU gives."""
    from vitkernels.bridge import lazy_target

    return lazy_target.platform() == "TPU"
