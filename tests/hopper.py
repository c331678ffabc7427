"""Shared setup for the tests of Hopper kernels."""

import os

import pytest

# In the interpreter, a kernel's warpgroups are XLA threads that wait for each other. XLA starts one per core, which
# deadlocks on a machine with two. JAX reads this when it initializes the CPU backend.
os.environ.setdefault("NPROC", "8")
jax = pytest.importorskip("jax")

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"Mosaic GPU's interpreter needs jax 0.11 or newer, this is {jax.__version__}: pip install 'jax>=0.11' "
    "(on Python 3.12)",
)


def error(x, exact) -> float:
    """Return the error relative to the norm."""
    return ((x.double() - exact).norm() / exact.norm()).item()
