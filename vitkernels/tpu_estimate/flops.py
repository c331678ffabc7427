"""Count the floating-point operations of the matrix products in a JAX program, those inside Pallas kernels included.

A kernel's body counts once per step of its grid. A branch counts as its most expensive arm, so a kernel that skips
blocks by their contents counts as if it skipped none. A loop without a known length counts as one trip.
"""

import math
from typing import Any


def matrix_flops(jaxpr: Any) -> int:
    """Return the FLOPs of all products of a jaxpr; a multiply-add counts as two."""
    return sum(_of(equation) for equation in jaxpr.eqns)


def pallas_calls(jaxpr: Any) -> list[Any]:
    """Return the equations of a jaxpr that call a Pallas kernel, at any depth."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            found.append(equation)
        else:
            found += [call for inner in _inner(equation) for call in pallas_calls(inner)]
    return found


def _of(equation: Any) -> int:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval.shape, parameters["dimension_numbers"]
        return 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[numbers.rhs_spec[0]]
    if name == "cond":
        return max(matrix_flops(inner) for inner in _inner(equation))
    times = 1
    if name == "pallas_call":
        times = math.prod(size for size in parameters["grid_mapping"].grid if isinstance(size, int))
    elif name == "scan":
        times = parameters["length"]
    return times * sum(matrix_flops(inner) for inner in _inner(equation))


def _inner(equation: Any) -> list[Any]:
    """Return the jaxprs in an equation's parameters."""
    found = []
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                found.append(part)
    return found
