"""Python functions as PyTorch operators that torch.compile does not look into."""

import torch
from torch import Tensor
from torch.library import define, impl


def operator(schema: str):
    """Decorator: makes a function the operator `torch.ops.vitkernels.<name>` of that schema, and returns the operator.

    What torch.library.custom_op does, without its Python layers: they cost more host time than a short kernel needs.
    A fake implementation and gradients are registered with torch.library as for any operator.
    """
    name = "vitkernels::" + schema.partition("(")[0]
    define(name, schema[schema.index("(") :])

    def register(function):
        impl(name, "CompositeExplicitAutograd")(function)
        return getattr(torch.ops.vitkernels, name.removeprefix("vitkernels::")).default

    return register


def calculable(x: Tensor | None) -> Tensor | None:
    """Triton's interpreter has no bfloat16: on the CPU it is calculated in float32, and rounded at the end."""
    return x.float() if x is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16 else x
