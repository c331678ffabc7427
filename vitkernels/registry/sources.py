"""The source of a backend's code: a module, an object, or an entry point of another package."""

import logging
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from vitkernels.errors import UsageError

log = logging.getLogger("vitkernels")

# package -> the extras of this package that install it, and what each is for
_EXTRAS = {
    "triton": {"cuda": "for an NVIDIA GPU"},
    "jax": {"hopper": "for a Hopper GPU", "tpu": "for a TPU"},
    "torch_xla": {"tpu": "for a TPU"},
}


@dataclass(frozen=True)
class Source:
    """One backend before its import.

    Args:
        target: "package.module", "package.module:ATTRIBUTE", or the backend itself.
        provider: who registered it, for messages; empty for this package's own backends.
    """

    target: object
    provider: str = ""

    def __str__(self) -> str:
        target = self.target if isinstance(self.target, str) else f"an instance of {type(self.target).__qualname__}"
        return f"{target} ({self.provider})" if self.provider else target

    def load(self) -> object:
        """Import the target and return the module or the attribute; import errors propagate.

        Raises UsageError for an attribute that the module lacks.
        """
        if not isinstance(self.target, str):
            return self.target
        module, _, attributes = self.target.partition(":")
        loaded = import_module(module)
        for attribute in filter(None, attributes.split(".")):
            if not hasattr(loaded, attribute):
                message = f"{self} cannot be imported: {module} has no attribute {attribute}"
                raise UsageError(message, code="registry.no_attribute", target=self.target, attribute=attribute)
            loaded = getattr(loaded, attribute)
        return loaded

    def failure(self, error: Exception) -> str:
        """Return the reason for the failed import, in one line."""
        if isinstance(error, UsageError):
            return str(error)
        return f"{self} cannot be imported: {type(error).__name__}: {error}"


def missing_package(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error that names the extras to install; None if none installs the missing package."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    extras = _EXTRAS[package]
    choices = " or ".join(f"pip install 'vitkernels[{extra}]' {purpose}" for extra, purpose in extras.items())
    message = f"{package} is not installed: {choices} (Linux only)"
    return UsageError(message, code="registry.missing_package", package=package, extras=list(extras))


def from_entry_points(group: str, prefix: str = "") -> list[tuple[str, Source]]:
    """Return (backend name, source) for each entry point of the group whose name starts with the prefix.

    Reads the metadata of the installed packages, once per group, and imports none of them.
    """
    named = [(name, source) for name, source in _read(group) if name.startswith(prefix)]
    return [(name.removeprefix(prefix), source) for name, source in named]


@cache
def _read(group: str) -> list[tuple[str, Source]]:
    from importlib.metadata import entry_points  # not needed by programs that never use a backend

    try:
        found = sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value))
    except Exception as error:  # corrupt metadata of any installed package
        log.warning("could not read entry points %s (%r); backends of other packages are missing", group, error)
        return []
    sources = []
    for entry in found:
        package = f"{entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"
        target = entry.value.partition("[")[0].strip()  # extras in brackets are for installers
        sources.append((entry.name, Source(target, f"entry point of {package}")))
    return sources
