"""Turn a Pallas kernel and its gradient into a differentiable JAX function; without a TPU, it is interpreted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.extend.core as jex_core

from vitkernels.bridge.jax_compat import interpreted

Static = tuple[tuple[str, Any], ...]


def differentiable(kernel: Callable, vjp: Callable | None = None) -> Callable:
    """Return f(*arrays, **static), which calls `kernel` and takes its gradients from `vjp`.

    Args:
        kernel: a function of arrays and static keywords that calls Pallas kernels for TPU.
        vjp: vjp(arrays, outputs, cotangents, **static) returns a gradient per array, or None for one that has none.
            `outputs` and `cotangents` are tuples. None for a function of integers.

    On a TPU the kernel is compiled by Mosaic; on other platforms it runs in Pallas' interpreter, for tests.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(0,))
    def call(static: Static, *arrays):
        return _on_platform(partial(kernel, **dict(static)), arrays)

    def forward(static: Static, *arrays):
        outputs = call(static, *arrays)
        return outputs, (arrays, outputs)

    def backward(static: Static, saved, cotangents):
        arrays, outputs = saved
        if vjp is None:
            raise TypeError(f"{kernel.__name__} has no gradient")
        return tuple(_on_platform_vjp(partial(vjp, **dict(static)), arrays, _tuple(outputs), _tuple(cotangents)))

    call.defvjp(forward, backward)
    return lambda *arrays, **static: call(tuple(sorted(static.items())), *arrays)


def _tuple(outputs) -> tuple:
    return tuple(outputs) if isinstance(outputs, (tuple, list)) else (outputs,)


def _on_platform_vjp(vjp: Callable, arrays: tuple, outputs: tuple, cotangents: tuple) -> list:
    """Return the gradients; those that are None cannot leave a traced function, and are put back afterwards."""
    missing: list[bool] = []

    def gradients(*flat):
        split = len(arrays), len(arrays) + len(outputs)
        found = vjp(flat[: split[0]], flat[split[0] : split[1]], flat[split[1] :])
        missing[:] = [x is None for x in found]
        return [x for x in found if x is not None]

    found = iter(_on_platform(gradients, (*arrays, *outputs, *cotangents)))
    return [None if absent else next(found) for absent in missing]


def _on_platform(function: Callable, arrays: tuple):
    """Call `function` on a TPU, and its interpreted trace elsewhere; the platform is known when XLA compiles."""
    jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*arrays)
    structure = jax.tree.structure(shape)

    def run(closed, *flat):
        return jax.tree.unflatten(structure, jex_core.jaxpr_as_fun(closed)(*flat))

    return jax.lax.platform_dependent(*arrays, tpu=partial(run, jaxpr), default=partial(run, interpreted(jaxpr)))
