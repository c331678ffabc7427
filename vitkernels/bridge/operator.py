"""Define PyTorch operators that torch.compile treats as opaque, with low overhead in eager calls."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, overload

import torch
from torch import Tensor
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import forward_ad
from torch.library import define, impl, register_autograd, register_fake

from vitkernels.errors import UsageError

PLAIN_TYPES = torch.Tensor, torch.nn.Parameter  # tensor types without __torch_dispatch__ or __torch_function__
_INSTEAD = "use the plain PyTorch backend (backend='reference' for an op, 'native' for attention)"


class BoundedCache(dict):
    """A dict that clears itself when full, for keys such as shapes that may never repeat."""

    LIMIT = 4096

    def __setitem__(self, key, value):
        if len(self) >= self.LIMIT:
            self.clear()
        super().__setitem__(key, value)


class Operator:
    """A function registered as the operator `torch.ops.vitkernels.<name>`.

    Traced calls (torch.compile, fake tensors and other dispatch modes, torch.func, tensor subclasses) dispatch to the
    operator. All other calls run the function directly, with a plain autograd.Function for its gradient: the
    dispatcher's overhead exceeds the duration of a short kernel.
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
        self._with_gradient = self.traced  # until a formula is registered; a backward pass then warns

    def register_fake(self, function: Callable) -> Callable:
        """Register the fake implementation; a decorator like torch.library.register_fake."""
        return register_fake(self.name)(function)

    def register_autograd(self, backward: Callable, *, setup_context: Callable) -> None:
        """Register the gradient formula, as torch.library.register_autograd does."""
        register_autograd(self.name, backward, setup_context=setup_context)

        def forward(ctx, *args):
            output = self.function(*args)
            setup_context(ctx, args, output)
            return output

        functions = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        function: Any = type(self.traced._opname, (torch.autograd.Function,), functions)
        self._with_gradient = function.apply

    def __deepcopy__(self, memo) -> "Operator":
        return self  # an operator is registered once per process

    def __call__(self, *args):
        tensors = [args[i] for i in self._tensors]
        if not runs_eagerly(tensors):
            refuse_unsupported_derivatives(self.name, tensors)
            return self.traced(*args)
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*args):
            return self._with_gradient(*args)
        return self.function(*args)


def runs_eagerly(tensors: Iterable[Tensor | None]) -> bool:
    """Return whether an operation on these tensors executes immediately: plain tensors, and nothing traces the call."""
    if (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()  # fake tensors, operation counters
        or _len_torch_dispatch_stack_pre_dispatch()  # make_fx(pre_dispatch=True)
        or torch._C._are_functorch_transforms_active()  # torch.func
        or forward_ad._current_level >= 0  # a tensor may have a tangent
        or torch._C._get_tracing_state() is not None  # torch.jit.trace
    ):
        return False
    return not [x for x in tensors if x is not None and not _is_plain(x)]


def _is_plain(x: Tensor) -> bool:
    """Return whether x's memory holds its values: no subclass, no abstract device, no lazily negated view."""
    return type(x) in PLAIN_TYPES and (x.is_cuda or x.is_cpu) and not x.is_neg()


def refuse_unsupported_derivatives(what: str, tensors: Iterable[Tensor | None]) -> None:
    """Raise UsageError if forward-mode AD or torch.func would differentiate `what` with respect to these tensors.

    An operator supports only the backward pass. PyTorch would silently treat its tangents as zero, and torch.func.grad
    would fail with an error about Python classes.
    """
    refused = forward_ad._current_level >= 0  # in torch.func.jvp too
    if not torch.compiler.is_compiling():  # Dynamo cannot query the tensors; it reruns a failing call eagerly
        refused = (refused or torch._C._are_functorch_transforms_active()) and _are_differentiated()(tensors)
    if refused:
        raise UsageError(
            f"{what} supports the backward pass (loss.backward(), torch.autograd.grad), but neither forward-mode AD "
            f"(make_dual, torch.func.jvp) nor torch.func (grad, vjp, jacrev): {_INSTEAD}",
            code="bridge.derivative",
            operation=what,
        )


@functools.cache
def _are_differentiated() -> Callable[[Iterable[Tensor | None]], bool]:
    """Return the untraced check. It is built lazily because torch.compiler.disable imports Dynamo."""
    return torch.compiler.disable(lambda tensors: any(x is not None and _is_differentiated(x) for x in tensors))


def _is_differentiated(x: Tensor) -> bool:
    """Return whether forward-mode AD or torch.func tracks derivatives with respect to x."""
    forward = forward_ad._current_level >= 0
    while torch._C._functorch.is_functorch_wrapped_tensor(x):
        if torch._C._functorch.is_gradtrackingtensor(x) and (forward or x.requires_grad):
            return True
        x = torch._C._functorch.get_unwrapped(x)
    with torch._C._DisableFuncTorch():  # an enclosing vmap has no rule for unpack_dual
        return forward and forward_ad.unpack_dual(x).tangent is not None


def operator(schema: str, tags: Sequence[torch.Tag] = ()) -> Callable[[Callable], Operator]:
    """Return a decorator that registers a function as the `Operator` with this schema."""
    return functools.partial(Operator, schema, tags=tags)


def differentiable_once(what: str):
    """Return a decorator for the gradient formula of `what` that raises UsageError under create_graph=True.

    The kernels that compute a gradient are not differentiable; autograd would silently use zero for their derivative.
    """

    def decorate(formula):
        @functools.wraps(formula)
        def refusing(ctx, *gradients):
            if torch.is_grad_enabled():  # only create_graph=True enables it in a backward pass
                raise UsageError(
                    f"{what} supports first derivatives only, and create_graph=True requests more: {_INSTEAD}",
                    code="bridge.second_derivative",
                    operation=what,
                )
            return formula(ctx, *gradients)

        return refusing

    return decorate


@overload
def interpretable(x: Tensor) -> Tensor: ...


@overload
def interpretable(x: Tensor | None) -> Tensor | None: ...


def interpretable(x: Tensor | None) -> Tensor | None:
    """Return x in float32 if it is a bfloat16 CPU tensor, else x: Triton's interpreter has no bfloat16 arithmetic.

    The caller rounds the result to x's dtype.
    """
    return x.float() if x is not None and x.device.type == "cpu" and x.dtype == torch.bfloat16 else x


def aligned(x: Tensor) -> Tensor:
    """Return x if it is contiguous at a 16-byte-aligned address, so that kernels can load 16 bytes at a time.

    Otherwise return an aligned, contiguous copy.
    """
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides of all dimensions but the last; 0 for a dimension of size 1, whose stride is arbitrary."""
    return tuple(stride if size > 1 else 0 for size, stride in zip(x.shape[:-1], x.stride(), strict=False))


def readable(x: Tensor) -> Tensor:
    """Return x if kernels can load 16 bytes at a time from its rows (as in model layouts), else an aligned copy."""
    aligned_rows = x.stride(-1) == 1 and all(stride % 8 == 0 for stride in row_strides(x))
    return x if aligned_rows and x.data_ptr() % 16 == 0 else aligned(x)
