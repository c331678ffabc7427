"""Deprecated, for one release: sweeps moved to vitkernels.sweep.

Configurations copied from conf/config.yaml name vitkernels.training.sweep.VerdictTable as Hydra's callback.
"""

import warnings
from importlib import import_module
from typing import Any

_MOVED = {"VerdictTable": "vitkernels.sweep.job", "run_job": "vitkernels.sweep.job"}


def __getattr__(name: str) -> Any:
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} moved: use {_MOVED[name]}.{name}", DeprecationWarning, stacklevel=2)
    return getattr(import_module(_MOVED[name]), name)  # training itself imports nothing from the layers above it
