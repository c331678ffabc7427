"""Python functions as PyTorch operators that torch.compile does not look into."""

import functools

import torch
from torch import Tensor
from torch.library import define, impl

from vitkernels.errors import UsageError


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


def differentiable_once(what: str):
    """Decorator of a gradient's formula, that of `what`, for the message: raises UsageError under create_graph=True.

    Kernels that calculate a gradient have none of their own, and autograd would take it for zero: wrong, and silently.
    """

    def decorate(formula):
        @functools.wraps(formula)
        def refusing(ctx, *gradients):
            if torch.is_grad_enabled():  # by create_graph=True alone
                raise UsageError(
                    f"{what} is differentiable once, and create_graph=True asks for more: take the plain PyTorch one, "
                    "backend='reference' of an op or 'native' of attention"
                )
            return formula(ctx, *gradients)

        return refusing

    return decorate


def calculable(x: Tensor | None) -> Tensor | None:
    """Triton's interpreter has no bfloat16: on the CPU it is calculated in float32, and rounded at the end."""
    return x.float() if x is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16 else x
