"""Run foreign kernels as PyTorch operations: `triton_call` for Triton kernels, `pallas_op` for JAX functions.

Both load on first use; importing this package needs neither triton nor jax.
"""

from importlib import import_module

__all__ = ["pallas_op", "triton_call"]

_MODULES = {"pallas_op": "vitkernels.bridge.pallas", "triton_call": "vitkernels.bridge.triton"}


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)
