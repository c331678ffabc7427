"""A decorator for functions that torch.compile must call, not trace."""

from typing import Any, TypeVar

F = TypeVar("F")


def constant_when_traced(function: F) -> F:
    """Mark a function whose result is a constant of a compiled graph, because it imports, logs or reads a file.

    Equivalent to torch.compiler.assume_constant_result, which would import torch._dynamo and Triton: a second of
    start-up for every program that imports this package.
    """
    marked: Any = function
    marked._dynamo_marked_constant = True
    return function
