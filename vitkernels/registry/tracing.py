"""A mark for functions that torch.compile must call, not trace."""

from collections.abc import Callable


def constant_when_traced(function: Callable) -> Callable:
    """Mark a function whose result is a constant of a compiled graph, because it imports, logs or reads a file.

    Equal to torch.compiler.assume_constant_result, which imports torch._dynamo and Triton: a second for every program
    that imports this package.
    """
    function._dynamo_marked_constant = True
    return function
