"""What the tests of all Hopper kernels share."""

import os

import pytest

# A kernel's warpgroups wait for each other in the interpreter's threads; with as many of XLA's as there are cores, a
# machine of two would wait for ever. Read when JAX first looks for the CPU.
os.environ.setdefault("NPROC", "8")
jax = pytest.importorskip("jax")

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"Mosaic GPU's interpreter needs jax 0.11 or newer, this is {jax.__version__}: pip install 'jax>=0.11' "
    "(on Python 3.12)",
)


def error(x, exact) -> float:
    """Relative to the norm."""
    return ((x.double() - exact).norm() / exact.norm()).item()
