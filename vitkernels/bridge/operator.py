"""Python functions as PyTorch operators that torch.compile does not look into."""

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.library import define, impl, register_autograd, register_fake

from vitkernels.errors import UsageError

PLAIN = torch.Tensor, torch.nn.Parameter  # the classes of tensors that are no subclass
_INSTEAD = "take the plain PyTorch one, backend='reference' of an op or 'native' of attention"


class Remembered(dict):
    """What was found out about calls, by all that decides it; forgets it where shapes never repeat."""

    LIMIT = 4096

    def __setitem__(self, call, found):
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(call, found)


class Operator:
    """A function as the operator `torch.ops.vitkernels.<name>`, and as itself.

    Where a call is traced (torch.compile, fake tensors and other dispatch modes, torch.func, subclasses), it is a call
    of the operator. Everywhere else the function runs at once, and its gradient is a plain autograd.Function: the
    dispatcher and the Python around it take longer than a short kernel.
    """

    def __init__(self, schema: str, function: Callable, tags: Sequence[torch.Tag] = ()):
        name = schema.partition("(")[0]
        self.name = f"vitkernels::{name}"
        self.function = function
        define(self.name, schema[len(name) :], tags=tags)
        impl(self.name, "CompositeExplicitAutograd")(function)
        self.traced = getattr(torch.ops.vitkernels, name).default
        arguments = self.traced._schema.arguments
        self._tensors = [i for i, argument in enumerate(arguments) if "Tensor" in str(argument.type)]
        self._with_gradient = self.traced  # as long as no formula is registered: a backward pass then warns

    def register_fake(self, function: Callable) -> Callable:
        """As torch.library.register_fake; a decorator."""
        return register_fake(self.name)(function)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """As torch.library.register_autograd."""
        register_autograd(self.name, backward, setup_context=setup_context)

        def forward(ctx, *args):
            output = self.function(*args)
            setup_context(ctx, args, output)
            return output

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._with_gradient = type(self.traced._opname, (torch.autograd.Function,), functions).apply

    def __deepcopy__(self, memo) -> "Operator":
        return self  # PyTorch has one of each

    def __call__(self, *args):
        tensors = [args[i] for i in self._tensors]
        if not runs_at_once(tensors):
            refuse_other_derivatives(self.name, tensors)
            return self.traced(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return self._with_gradient(*args)
        return self.function(*args)


def runs_at_once(tensors: Iterable[Tensor | None]) -> bool:
    """Whether an operation on them is calculated where it is called, and its kernels see what PyTorch's would."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # fake tensors, counters of operations
        or _len_torch_dispatch_stack_pre_dispatch()  # make_fx(pre_dispatch=True)
        or torch._C._are_functorch_transforms_active()  # torch.func
        or forward_ad._current_level >= 0  # a tensor may have a tangent
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
    ):
        return False
    return not [x for x in tensors if x is not None and not _is_plain(x)]


def _is_plain(x: Tensor) -> bool:
    """Whether x is its memory: no subclass, not on an abstract device, not a view that is to be negated when read."""
    return type(x) in PLAIN and (x.is_cuda or x.is_cpu) and not x.is_neg()


def refuse_other_derivatives(what: str, tensors: Iterable[Tensor | None]) -> None:
    """Raises UsageError where forward-mode AD or torch.func would differentiate `what` by one of these tensors.

    An operator has a backward pass alone: PyTorch would take its tangents for zero without a word, and end
    torch.func.grad in an error about Python classes.
    """
    refused = forward_ad._current_level >= 0  # in torch.func.jvp too
    if not torch.compiler.is_compiling():  # Dynamo cannot ask the tensors; it runs eagerly what ends in an error
        refused = (refused or torch._C._are_functorch_transforms_active()) and _are_differentiated()(tensors)
    if refused:
        raise UsageError(
            f"{what} has a backward pass (loss.backward(), torch.autograd.grad), and no derivative for forward-mode AD "
            f"(make_dual, torch.func.jvp) or torch.func (grad, vjp, jacrev): {_INSTEAD}"
        )


@functools.cache
def _are_differentiated() -> Callable[[Iterable[Tensor | None]], bool]:
    """The function that is not to be traced; a decorator would import Dynamo together with this file."""
    return torch.compiler.disable(lambda tensors: any(x is not None and _is_differentiated(x) for x in tensors))


def _is_differentiated(x: Tensor) -> bool:
    """Whether forward-mode AD, or torch.func, follows what becomes of x."""
    forward = forward_ad._current_level >= 0
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x) and (forward or x.requires_grad):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    with torch._C._DisableFuncTorch():  # around it may be vmap, which does not know this question
        return forward and forward_ad.unpack_dual(x).tangent is not None


def operator(schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable], Operator]:
    """Decorator: makes a function the `Operator` of that schema."""
    return functools.partial(Operator, schema, tags=tags)


def differentiable_once(what: str):
    """Decorator of a gradient's formula, that of `what`, for the message: raises UsageError under create_graph=True.

    Kernels that calculate a gradient have none of their own, and autograd would take it for zero: wrong, and silently.
    """

    def decorate(formula):
        @functools.wraps(formula)
        def refusing(ctx, *gradients):
            if torch.is_grad_enabled():  # by create_graph=True alone
                raise UsageError(f"{what} is differentiable once, and create_graph=True asks for more: {_INSTEAD}")
            return formula(ctx, *gradients)

        return refusing

    return decorate


def calculable(x: Tensor | None) -> Tensor | None:
    """Triton's interpreter has no bfloat16: on the CPU it is calculated in float32, and rounded at the end."""
    return x.float() if x is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


def aligned(x: Tensor) -> Tensor:
    """x itself where a kernel can load 16 bytes at a time from it: without gaps, at an address divisible by 16; else a
    copy."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()
