"""One operation and its backends: names, lazy imports, refusals, and the order in which `auto` tries them."""

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import torch

from vitkernels.errors import UsageError, unknown_name
from vitkernels.registry.sources import Source, from_entry_points, missing_package
from vitkernels.registry.tracing import constant_when_traced
from vitkernels.registry.tuning_table import fastest_first

log = logging.getLogger("vitkernels")

PLACES = ("cpu", "cuda", "tpu", "xla")  # xla: an XLA device other than a TPU, such as PJRT_DEVICE=CPU provides


class Backend(Protocol):
    """One implementation of an op: an object, or a module with these two functions.

    Both take the parameters of `run` in the op's reference.py, by position. Attention describes a call by a `Problem`
    instead, so that a model can be checked without data.
    """

    def unsupported(self, *args: Any, **kwargs: Any) -> str | None:
        """Return why the backend does not support this call and what to change; None if it does."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Return the op's result."""


B = TypeVar("B", bound=Backend)

_AUTO = Source("the automatic choice")


def _two_functions(loaded: object) -> Any:
    absent = [name for name in ("unsupported", "run") if not callable(getattr(loaded, name, None))]
    if absent:
        raise TypeError(f"a backend needs the functions unsupported(...) and run(...); {absent[0]} is missing")
    return loaded


class _Loaded:
    """The imported backends, as attributes.

    Not a dict: torch.compile copies a dict at its first access in a trace, and would miss a backend that the same
    trace imports later. It reads attributes when they are used.
    """


class Op(Generic[B]):
    """An operation with interchangeable backends.

    Args:
        name: the op's public name.
        backends: name -> "package.module" or "package.module:ATTRIBUTE", imported at first use.
        auto: place (one of PLACES) -> the names that "auto" tries there, fastest first. List no backend that would only
            be interpreted. If all refuse, or the place is absent, "auto" uses the fallback.
        fallback: the backend that supports every call.
        features: arguments of a call -> (sizes that decide which backend is fastest, dtype of the arithmetic): the key
            under which `python -m vitkernels.tune` stores its measurements. On a GPU these override `auto`.
        group: the entry point group through which other packages add backends.
        prefix: the part of an entry point's name before the backend's name.
        adapt: turns an imported target into a backend, or raises.
    """

    def __init__(
        self,
        name: str,
        backends: Mapping[str, str],
        auto: Mapping[str, Iterable[str]],
        *,
        fallback: str = "reference",
        features: Callable[..., tuple[tuple[int, ...], torch.dtype]] | None = None,
        group: str,
        prefix: str = "",
        adapt: Callable[[object], B] = _two_functions,
    ):
        self.name = name
        self.auto = {place: tuple(names) for place, names in auto.items()}
        self.fallback = fallback
        self.features = features
        self._sources = {backend: Source(target) for backend, target in backends.items()}
        self._entry_points: tuple[str, str] | None = (group, prefix)  # None once they are read
        self._clashes: dict[str, tuple[Source, Source]] = {}
        self._failures: dict[str, str] = {}
        self._loaded = _Loaded()
        self._adapt = adapt

    @classmethod
    def in_folder(
        cls, package: str, backends: Iterable[str], auto: Mapping[str, Iterable[str]], features: Callable | None = None
    ) -> "Op[Any]":
        """Return the op of a package folder that holds one module per backend, the fallback `reference` among them.

        Other packages add backends through entry points in the group vitkernels.ops, named "<op>.<backend>".
        """
        name = package.rpartition(".")[2]
        modules = {backend: f"{package}.{backend}" for backend in backends}
        return cls(name, modules, auto, features=features, group="vitkernels.ops", prefix=f"{name}.")

    # ------------------------------------------------------------------ names and imports
    def names(self) -> tuple[str, ...]:
        """Return the name of every backend, those of other packages last."""
        self._read_entry_points()
        return tuple(self._sources)

    def source(self, name: str) -> Source:
        """Return the source of the backend's code; raise UsageError if no backend has the name."""
        self._read_entry_points()
        if name not in self._sources:
            raise unknown_name(f"{self.name} backend", name, {"auto", *self._sources})
        return self._sources[name]

    def get(self, name: str) -> B:
        """Return the backend with this name.

        Raises UsageError for an unknown name, for a name that two packages claim, and for a missing package that one of
        our extras installs. Any other error from importing the backend propagates.
        """
        if not self._is_loaded(name):
            self._load(name)
        backend: B = getattr(self._loaded, name)
        return backend

    @constant_when_traced  # torch.compile cannot trace an import
    def broken(self, name: str) -> str | None:
        """Return why the backend cannot be imported; None if it can, or if no backend has the name.

        Each import is tried once. Code that iterates over all backends calls this first, so that one broken backend
        does not stop the others.
        """
        if name in vars(self._loaded):  # the fast path of every call
            return None
        self._read_entry_points()
        if name in self._sources and name not in self._failures:
            try:
                self._load(name)
            except Exception as error:  # an unfinished kernel may fail in any way
                self._failures[name] = self._sources[name].failure(error)
        return self._failures.get(name)

    @constant_when_traced
    def _is_loaded(self, name: str) -> bool:
        return name in vars(self._loaded) or (self.broken(name) is None and name in self._sources)

    def _load(self, name: str) -> None:
        source = self.source(name)
        if name in self._clashes:
            raise self._clash(name, *self._clashes[name])
        try:
            loaded = source.load()
        except ModuleNotFoundError as error:
            missing = missing_package(error)
            if missing is None:
                raise
            raise missing from error
        try:
            adapted = self._adapt(loaded)
        except TypeError as error:
            raise UsageError(source.failure(error), code="registry.not_a_backend", op=self.name, name=name) from error
        setattr(self._loaded, name, adapted)
        self._failures.pop(name, None)

    # ------------------------------------------------------------------ backends of other packages
    def register(self, name: str, target: object, auto_for: str | Iterable[str] | None = None) -> None:
        """Add a backend.

        Args:
            name: an unused name, or the name of an entry point with the same target.
            target: the backend, a module, or "package.module:ATTRIBUTE", which is imported at first use.
            auto_for: the places (of PLACES) where "auto" tries it before all others. By default "auto" never chooses
                the backend, because its speed relative to the others has not been measured.

        Raises UsageError if the name is taken. Graphs that torch.compile has already made keep the backend they chose.
        """
        places = (auto_for,) if isinstance(auto_for, str) else tuple(auto_for or ())
        for place in places:
            if place not in PLACES:
                raise unknown_name("place for auto", place, PLACES)
        self._read_entry_points()
        source, known = Source(target, "registered"), self._owner(name)
        if name in self._clashes or (known is not None and known.target != target):
            raise self._clash(name, known or source, source)
        self._sources.setdefault(name, source)
        if not isinstance(target, str):
            try:
                self._load(name)
            except Exception:
                self.unregister(name)
                raise
        for place in places:
            self.auto[place] = (name, *(other for other in self.auto.get(place, ()) if other != name))

    def unregister(self, name: str) -> None:
        """Remove a backend that `register` added; raise UsageError for any other."""
        if self.source(name).provider != "registered":
            message = f"{self.name} backend {name!r} was not added by register(): it comes from {self.source(name)}"
            raise UsageError(message, code="registry.not_registered", op=self.name, name=name)
        del self._sources[name]
        vars(self._loaded).pop(name, None)
        self._failures.pop(name, None)
        for place, order in self.auto.items():
            self.auto[place] = tuple(other for other in order if other != name)

    def _read_entry_points(self) -> None:
        if self._entry_points is None:
            return
        found = from_entry_points(*self._entry_points)
        self._entry_points = None
        for name, source in found:
            known = self._owner(name)
            if known is None:
                self._sources[name] = source
            elif known.target != source.target:  # raised by `get`, so that programs without this backend keep working
                self._clashes[name] = known, source

    def _owner(self, name: str) -> Source | None:
        return self._sources.get(name, _AUTO if name == "auto" else None)

    def _clash(self, name: str, first: Source, second: Source) -> UsageError:
        fix = "rename or remove one"
        if first.provider == "registered":
            fix = f"rename one, or call unregister({name!r}) first"
        message = f"{self.name} backend {name!r} is defined twice, by {first} and by {second}; {fix}"
        return UsageError(
            message, code="registry.name_clash", op=self.name, name=name, sources=[str(first), str(second)]
        )

    # ------------------------------------------------------------------ choice
    def unsupported(self, name: str, *args: Any, **kwargs: Any) -> str | None:
        """Return why the backend does not support this call, or why its import failed; None if it supports it."""
        return self.broken(name) or self.get(name).unsupported(*args, **kwargs)

    def choose(self, order: Iterable[str], *args: Any, **kwargs: Any) -> tuple[str, dict[str, str]]:
        """Return the first backend of `order` that supports the call, else the fallback; and why the others refused."""
        refused: dict[str, str] = {}
        for name in order:
            reason = self.unsupported(name, *args, **kwargs)
            if reason is None:
                return name, refused
            refused[name] = reason
        return self.fallback, refused

    def kernel(self, device_type: str) -> str:
        """Return the name of the kernel that "fused" stands for: auto's first choice on that kind of device.

        Where auto has none, such as on a CPU, it is the one for NVIDIA GPUs, which is then interpreted.
        """
        return (self.auto.get(place_of(device_type)) or self.auto["cuda"])[0]

    def pick(self, backend: str, device: torch.device, *args: Any, **kwargs: Any) -> B:
        """Return the backend for a call: the named one, or for "auto" the fastest that supports it.

        Raises UsageError if the named one refuses. For "auto", logs once which faster ones refused and why.
        """
        if backend != "auto":
            reason = self.unsupported(backend, *args, **kwargs)
            if reason is not None:
                raise unsupported_error(self.name, backend, reason)
            return self.get(backend)
        name, refused = self.choose(self._order(device, args, kwargs), *args, **kwargs)
        if refused:
            say_once(f"{self.name}: auto chose {name}{passed_over(refused)}")
        return self.get(name)

    def _order(self, device: torch.device, args: tuple, kwargs: dict) -> tuple[str, ...]:
        """Return the backends that "auto" tries on the device, fastest first."""
        place = place_of(device.type)
        default = self.auto.get(place, ())
        if place != "cuda" or self.features is None:
            return default
        features, dtype = self.features(*args, **kwargs)
        measured = fastest_first(self.name, features, dtype, device.index, default)
        # A table may name backends that no longer exist, or that other packages did not register for auto.
        ours = tuple(name for name in measured if name in default or self._is_ours(name))
        unmeasured = tuple(name for name in default if name not in measured and not self._is_ours(name))
        return unmeasured + ours

    def _is_ours(self, name: str) -> bool:
        return name in self._sources and not self._sources[name].provider


def unsupported_error(op: str, backend: str, reason: str) -> UsageError:
    """Return the error of a named backend that does not support a call."""
    message = f"{op} backend {backend!r} does not support this call: {reason}"
    return UsageError(message, code="registry.unsupported", op=op, backend=backend, reason=reason)


def passed_over(refused: Mapping[str, str]) -> str:
    """Return the reasons for a log line, each after a semicolon."""
    return "".join([f"; not {name}: {reason}" for name, reason in refused.items()])


_said: set[str] = set()


@constant_when_traced  # logging would break torch.compile's graph
def say_once(message: str) -> None:
    """Log a message unless it was logged before."""
    if message not in _said:
        _said.add(message)
        log.info(message)


def op_of(function: Callable) -> Op:
    """Return the `Op` of a function of `vitkernels.ops`: the BACKENDS of its module."""
    return sys.modules[function.__module__].BACKENDS


def place_of(device_type: str) -> str:
    """Return the place, a key of `auto`, for a device type: for "xla" either "tpu" or "xla", else the type itself."""
    if device_type != "xla":
        return device_type
    from vitkernels.bridge import lazy_target

    return "tpu" if lazy_target.platform() == "TPU" else "xla"
