"""Operations with swappable implementations: one folder each, with a contract, a reference and a file per backend.

Every op takes `backend`: "auto" (the fastest one that takes the call here) or a name, which runs or raises.
"""

from importlib import import_module

_OPS = {}

__all__ = list(_OPS)


def __getattr__(name: str):
    if name not in _OPS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_OPS[name]), name)
