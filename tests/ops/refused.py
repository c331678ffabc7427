"""Skip the parameters that a backend refuses, and check that it refuses them in the same way when it is called."""

from collections.abc import Callable

import pytest
from expecting import error

from vitkernels.registry.op import Op


def skip_if_refused(op: Op, backend: str, args: tuple, call: Callable, may_refuse: bool = True) -> None:
    """If the backend cannot take `args`, require `call` to raise that reason, and skip the test.

    args: as the op passes them to its backends.
    may_refuse: whether a refusal is expected; otherwise it fails the test.
    """
    reason = op.unsupported(backend, *args)
    if reason is not None:
        assert may_refuse, reason
        with error("registry.unsupported", backend=backend, reason=reason):
            call()
        pytest.skip(reason)
