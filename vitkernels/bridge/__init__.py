"""Foreign kernels as PyTorch operations: `triton_call` for Triton kernels, `pallas_op` for JAX ones.

Imported on first use: neither triton nor jax is needed to import this package.
"""

from importlib import import_module

__all__ = ["pallas_op", "triton_call"]

_MODULES = {"pallas_op": "vitkernels.bridge.pallas", "triton_call": "vitkernels.bridge.triton"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
