"""Let JAX keep its devices while this package imports kernels that PyTorch shares.

The kernels share packages with PyTorch's operators, whose bridge reserves the TPU for torch_xla when it is imported
(vitkernels.bridge.jax_compat). In a JAX program the TPU belongs to JAX.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import jax

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_KINDS = {"TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p", "TPU v6 lite": "v6e"}


@contextmanager
def kept_by_jax() -> Iterator[None]:
    """Restore JAX's choice of platforms, and of preallocation, after the imports in this context."""
    platforms, preallocate = jax.config.jax_platforms, os.environ.get(_PREALLOCATE)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        jax.config.update("jax_platforms", platforms)
        if preallocate is None:
            os.environ.pop(_PREALLOCATE, None)


def chip() -> str | None:
    """Return the name of JAX's TPU in the table of block sizes, or None."""
    if jax.default_backend() != "tpu":
        return None
    kind = jax.devices()[0].device_kind
    return _KINDS.get(kind)
