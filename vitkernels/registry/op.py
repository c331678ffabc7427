"""How an op finds the implementation that runs: one module per backend, imported when it is first asked for.

A backend module has two functions with the same parameters, those that the op hands to `pick`:
    unsupported(...) -> str | None    why it cannot take these arguments here, and what would mend it
    run(...)                          the result
"""

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType

import torch

from vitkernels.errors import UsageError, unknown_name
from vitkernels.registry.tuning_table import fastest_first

log = logging.getLogger("vitkernels")


@dataclass(frozen=True)
class Backends:
    """The implementations of one op.

    op: the op's public name, for messages.
    modules: backend name -> module; "reference" is among them and takes everything.
    preference: place (cpu, cuda, tpu, xla) -> names that `auto` tries there, fastest first. Kernels that would only be
        interpreted do not belong in it. A place that is not listed, or where all refuse, gets the reference.
    features: from a call's arguments, the sizes of its parameters (and an option, as a number, where it decides) and
        the dtype it calculates in: under these `python -m vitkernels.tune` keeps what it measured, whose order on a
        GPU comes before `preference`.
    """

    op: str
    modules: Mapping[str, str]
    preference: Mapping[str, tuple[str, ...]]
    features: Callable[..., tuple[tuple[int, ...], torch.dtype]] | None = None

    def names(self) -> tuple[str, ...]:
        """Every backend's name; "auto" chooses among them."""
        return tuple(self.modules)

    def get(self, name: str) -> ModuleType:
        """The module of that backend; an unknown name raises UsageError that lists the names."""
        if name not in self.modules:
            raise unknown_name(f"{self.op} backend", name, ("auto", *self.modules))
        _import(self.modules[name])
        # torch.compile knows sys.modules as it was at its first look; of a package it sees what was imported since.
        package, _, module = self.modules[name].rpartition(".")
        return getattr(sys.modules[package], module)

    def pick(self, backend: str, device: torch.device, *args, **kwargs) -> ModuleType:
        """The module to run a call with these arguments: the named one or UsageError; for "auto" the first that can.

        The log says, once, why auto passed over faster ones.
        """
        if backend != "auto":
            reason = self.unsupported(backend, *args, **kwargs)
            if reason is not None:
                raise UsageError(f"{self.op} backend {backend!r} cannot take this call: {reason}")
            return self.get(backend)
        passed_over = ""
        for name in self._order(device, args, kwargs):
            reason = self.unsupported(name, *args, **kwargs)
            if reason is None:
                break
            passed_over += f"; not {name}: {reason}"
        else:
            name = "reference"
        if passed_over:
            _say(f"{self.op}: auto chose {name}{passed_over}")
        return self.get(name)

    def unsupported(self, name: str, *args, **kwargs) -> str | None:
        """Why that backend cannot take a call with these arguments, a missing package included; None when it can."""
        missing = _missing(self.modules[name]) if name in self.modules else None
        return missing or self.get(name).unsupported(*args, **kwargs)

    def _order(self, device: torch.device, args: tuple, kwargs: dict) -> tuple[str, ...]:
        """What `auto` tries, fastest first."""
        place = place_of(device)
        preferred = self.preference.get(place, ())
        if place != "cuda" or self.features is None:
            return preferred
        features, dtype = self.features(*args, **kwargs)
        measured = fastest_first(self.op, features, dtype, device.index, preferred)
        return tuple(name for name in measured if name in self.modules)  # a table may be of a version that had others


_said: set[str] = set()


@torch.compiler.assume_constant_result  # a log would break torch.compile's graph
def _say(message: str) -> None:
    if message not in _said:
        _said.add(message)
        log.info(message)


_EXTRAS = {"triton": "cuda", "jax": "tpu", "torch_xla": "tpu"}  # package -> the extra that brings it


@torch.compiler.assume_constant_result
def _missing(module: str) -> str | None:
    """The package that this backend's module wants in vain, and what brings it."""
    if module in sys.modules:  # an import that does nothing takes longer than a short kernel
        return None
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRAS:
            raise
        return f"{package} is not installed: pip install 'vitkernels[{_EXTRAS[package]}]' (Linux only)"
    except UsageError as error:  # the bridges say it in their own words
        return str(error)
    return None


@torch.compiler.assume_constant_result  # torch.compile cannot trace an import, and need not
def _import(module: str) -> None:
    if module not in sys.modules:
        import_module(module)


def backends_of(op: Callable) -> Backends:
    """The table of an op, which lies beside its function."""
    return sys.modules[op.__module__].BACKENDS


def place_of(device: torch.device) -> str:
    """cpu, cuda, tpu, or xla for an XLA device that is no TPU (such as PJRT_DEVICE=CPU gives)."""
    if device.type != "xla":
        return device.type
    from vitkernels.bridge import lazy_target

    return "tpu" if lazy_target.platform() == "TPU" else "xla"
