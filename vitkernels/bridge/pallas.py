"""Turn a JAX function, with or without Pallas kernels, into a torch op: `op = pallas_op(jax_fn)`.

    @jax.jit
    def add_vectors(x, y):
        return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x, y)

    add = pallas_op(add_vectors)
    add(torch.ones(8), torch.ones(8))                                # CPU: interpreted, zero-copy
    add(torch.ones(8, device="xla"), torch.ones(8, device="xla"))    # in the lazy graph, compiled for the TPU

The op is registered with torch.library and has a fake implementation, so it works under torch.compile, torch.export
and FakeTensorMode. It supports first derivatives through autograd, and torch.func.vmap; it raises under torch.func.grad
and forward-mode AD, which torch.library ops do not support. pallas_devices.py runs it on each device.
"""

import ast
import functools
import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import Tensor

from vitkernels.bridge import pallas_devices as devices
from vitkernels.bridge import pallas_spmd
from vitkernels.bridge.jax_compat import keep_jax_off_tpu
from vitkernels.bridge.operator import differentiable_once, refuse_unsupported_derivatives
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class BoundCall:
    """The static arguments of a call to a JAX function, and the batch axes of each enclosing vmap, innermost first."""

    static: tuple[tuple[str, object], ...] = ()
    vmaps: tuple[tuple[int | None, ...], ...] = ()
    # Part of equality, because 1, 1.0 and True compare equal, as do 0.0 and -0.0, but yield different programs.
    text: str = field(init=False, repr=False)

    def __post_init__(self):
        object.__setattr__(self, "text", repr((self.static, self.vmaps)))

    def bind(self, function: Callable) -> Callable:
        """Return `function` with only array arguments left."""
        bound = functools.partial(function, **dict(self.static)) if self.static else function
        for in_axes in self.vmaps:
            bound = jax.vmap(bound, in_axes=in_axes)
        return bound


class _CallCodec:
    """Encode calls as strings, the only form that a torch op's schema, and so an exported graph, can hold.

    A call with literal static arguments is written out and can be decoded in another process. A call with any other
    static argument (a function) gets a name that only this process can decode.
    """

    def __init__(self):
        self._named: dict[str, BoundCall] = {}
        self._names: dict[BoundCall, str] = {}

    def encode(self, call: BoundCall) -> str:
        try:
            hash(call)
        except TypeError as error:
            message = f"static arguments must be hashable, got {dict(call.static)}"
            raise UsageError(message, code="bridge.static_not_hashable") from error
        try:
            if ast.literal_eval(call.text) == (call.static, call.vmaps):
                return call.text
        except (ValueError, SyntaxError):
            pass
        name = self._names.setdefault(call, f"call {len(self._names)}")
        self._named[name] = call
        return name

    def decode(self, text: str) -> BoundCall:
        if text in self._named:
            return self._named[text]
        if text.startswith("call "):
            raise UsageError(
                "this graph was exported with a static argument that is not a literal (a function), which only the "
                "exporting process can decode; bind it first: pallas_op(functools.partial(jax_fn, ...))",
                code="bridge.static_not_saved",
            )
        return BoundCall(*ast.literal_eval(text))


_call_codec = _CallCodec()


def pallas_op(
    jax_fn: Callable,
    output_shape_dtype_fn: Callable | None = None,
    *,
    vjp: Callable | None = None,
    name: str = "",
    shard_batch: bool = False,
    shard_sums: bool = False,
) -> Callable:
    """Register a JAX function, a Pallas kernel or plain JAX, as a torch op.

    Args:
        jax_fn: takes arrays by position and static (hashable) arguments by keyword. If it returns an array, the op
            returns a tensor; if it returns a pytree, the op returns a flat tuple. It needs no `interpret` argument: the
            bridge interprets kernels on the CPU and compiles them for TPU and GPU.
        output_shape_dtype_fn: takes the tensors, returns [(shape, torch dtype), ...], as in PyTorch/XLA's guide.
            Optional; checked against JAX's shape inference.
        vjp: the backward pass as a JAX function `vjp(primals, outputs, cotangents, **static)` that returns one gradient
            or None per primal. `outputs` is a flat tuple; the cotangent of an integer output is None. The default,
            jax.vjp, reruns the forward pass; it differentiates plain JAX and jax.custom_vjp functions, but not a bare
            pallas_call.
        name: the op's name, `torch.ops.vitkernels.<name>`; defaults to jax_fn's name.
        shard_batch: declares that the function treats each entry of dimension 0 independently. Under torch_xla's SPMD
            with a global mesh, forward and backward then run on each device's shard of the batch (pallas_spmd.py). XLA
            cannot partition a kernel and would otherwise gather the full batch on every device.
        shard_sums: declares that the function sums over dimension 0 and returns outputs with a leading 1. Under SPMD
            it then runs on each device's shard, and the outputs have one entry per device, which the caller adds.

    Returns:
        `op(*tensors, **static)`. Tensors must be on one device ("cpu", "cuda" or "xla"), contiguous on CPU and CUDA,
        and of a dtype that JAX supports. A function without tensor arguments also takes `device=`.

    Raises UsageError (a ValueError) for unsupported tensors, TypeError for a positional argument that is not a tensor.
    Source: PyTorch/XLA, "Custom kernels via Pallas"; replaces its make_kernel_from_pallas.
    """
    keep_jax_off_tpu()
    kernel = _Kernel(_op_name(name or _function_name(jax_fn)), jax_fn, shard_batch, shard_sums)
    _differentiate(kernel, vjp)

    # Dynamo keeps this call in its graph; AOTAutograd traces into it, to the registered op and its fake implementation.
    @torch.compiler.allow_in_graph
    def run(*tensors, device, **static):
        target = devices.check_tensors(kernel.name, tensors, device)
        call = BoundCall(tuple(sorted((name, _number(value)) for name, value in static.items())))
        if output_shape_dtype_fn is not None:
            _check_declared(kernel, call, tensors, output_shape_dtype_fn(*tensors))
        flat = kernel.op(list(tensors), _call_codec.encode(call), target)
        return flat[0] if kernel.trace(call, tensors).single else tuple(flat)

    def op(*tensors: Tensor, device: torch.device | str | None = None, **static):
        refuse_unsupported_derivatives(kernel.name, tensors)  # outside `run`, so that Dynamo guards on the result
        return run(*tensors, device=device, **static)

    op.__name__ = op.__qualname__ = kernel.name
    op.__doc__ = jax_fn.__doc__
    op.torch_op = kernel.op  # type: ignore[attr-defined]  # the operator behind the function
    return op


def _number(value):
    """Return a symbolic number of torch.compile(dynamic=True) as its concrete value: JAX traces static shapes only."""
    kinds = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
    return kinds[type(value)](value) if type(value) in kinds else value


class _Kernel:
    """Register a JAX function as `torch.ops.vitkernels.<name>(Tensor[] tensors, str call, Device device)`."""

    def __init__(self, name: str, function: Callable, shard_batch: bool, shard_sums: bool = False):
        self.name = name
        self.shard_sums = shard_sums
        self.shard_batch = shard_batch
        self._function = function
        self.traces: dict[tuple, devices.Trace] = {}
        self.op = torch.library.custom_op(
            f"vitkernels::{name}",
            self._run,
            mutates_args=(),
            schema="(Tensor[] tensors, str call, Device device) -> Tensor[]",
        )
        self.op.register_fake(self._fake)
        self.op.register_vmap(self._vmap)

    def trace(self, call: BoundCall, tensors) -> devices.Trace:
        """Return the function's trace for these tensors' shapes and dtypes; each is traced once."""
        shapes = tuple((tuple(map(int, t.shape)), t.dtype) for t in tensors)
        # A trace bakes in the matmul precision and the 64-bit setting.
        precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        key = (call, shapes, precision, jax.config.jax_enable_x64)  # type: ignore[attr-defined]
        if key not in self.traces:
            keep_jax_off_tpu()
            self.traces[key] = devices.Trace.of(self.name, call.bind(self._function), shapes)
        return self.traces[key]

    def _run(self, tensors: list[Tensor], call: str, device: torch.device) -> list[Tensor]:
        read = _call_codec.decode(call)

        def run(tensors):
            return self.trace(read, tensors).run([t.detach() for t in tensors], device)

        if (self.shard_batch or self.shard_sums) and device.type == "xla" and not read.vmaps:
            return pallas_spmd.run_per_shard(run, tensors, self.trace(read, tensors).outputs, sums=self.shard_sums)
        return run(tensors)

    def _fake(self, tensors, call, device):
        outputs = self.trace(_call_codec.decode(call), tensors).outputs
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in outputs]

    def _vmap(self, info, in_dims, tensors, call, device):
        inner = _call_codec.decode(call)
        mapped = BoundCall(inner.static, (*inner.vmaps, tuple(in_dims[0])))
        outputs = self.op([t.contiguous() for t in tensors], _call_codec.encode(mapped), device)
        return outputs, [0] * len(outputs)


def _differentiate(kernel: _Kernel, vjp: Callable | None) -> None:
    """Register the backward pass of `kernel` as a second op, `<name>_backward`."""
    backward = _Kernel(f"{kernel.name}_backward", _backward_function(kernel._function, vjp), kernel.shard_batch)

    def setup(ctx, inputs, output):
        tensors, ctx.call, ctx.device = inputs
        ctx.save_for_backward(*tensors, *(output if vjp is not None else ()))
        ctx.n_in = len(tensors)
        ctx.out_like = [(o.shape, o.dtype, o.device) for o in output]

    @differentiable_once(kernel.name)
    def differentiate(ctx, grads):
        wanted = tuple(bool(w) for w in ctx.needs_input_grad[0])
        if not any(wanted):
            return [None] * ctx.n_in, None, None
        cotangents = [
            (torch.zeros(shape, dtype=dtype, device=device) if g is None else g.contiguous())
            for g, (shape, dtype, device) in zip(grads, ctx.out_like, strict=True)
            if dtype.is_floating_point
        ]
        inner = _call_codec.decode(ctx.call)
        call = BoundCall((("call", inner), ("n_in", ctx.n_in), ("wanted", wanted)))
        found = iter(backward.op([*ctx.saved_tensors, *cotangents], _call_codec.encode(call), ctx.device))
        return [next(found) if w else None for w in wanted], None, None

    kernel.op.register_autograd(differentiate, setup_context=setup)


def _backward_function(function: Callable, vjp: Callable | None) -> Callable:
    """Return the backward op's JAX function: (*primals, *outputs if vjp, *cotangents) -> the wanted gradients."""

    def backward(*arrays, call: BoundCall, n_in: int, wanted: tuple[bool, ...]):
        primals, rest = arrays[:n_in], arrays[n_in:]
        forward = call.bind(function)
        flat_out, out_tree = jax.tree.flatten(jax.eval_shape(forward, *primals))
        outputs, rest = (rest[: len(flat_out)], rest[len(flat_out) :]) if vjp is not None else ((), rest)
        given = iter(rest)
        cotangents = [next(given) if _floats(o) else None for o in flat_out]
        if vjp is not None and not call.vmaps:
            gradients = vjp(primals, outputs, tuple(cotangents), **dict(call.static))
            if len(gradients) != n_in:
                message = f"vjp must return one gradient (or None) for each of {n_in} inputs, got {gradients}"
                raise UsageError(message, code="bridge.vjp_count", expected=n_in, got=len(gradients))
        else:
            adopted = function if vjp is None else _with_vjp(function, vjp, call)
            differentiable = call.bind(adopted) if vjp is None else BoundCall((), call.vmaps).bind(adopted)
            gradients = _jax_vjp(differentiable, primals, cotangents, flat_out, out_tree)
        return [
            jnp.zeros_like(x) if g is None else _checked_gradient(i, g, x)
            for i, (g, x, w) in enumerate(zip(gradients, primals, wanted, strict=True))
            if w
        ]

    return backward


def _jax_vjp(forward, primals, cotangents, flat_out, out_tree):
    no_cotangent = [np.zeros(o.shape, jax.dtypes.float0) for o in flat_out]
    cotangents = [zero if c is None else c for c, zero in zip(cotangents, no_cotangent, strict=True)]
    try:
        _, pull = jax.vjp(forward, *primals)
        return pull(jax.tree.unflatten(out_tree, cotangents))
    except (NotImplementedError, ValueError, AssertionError) as error:  # what JAX raises for a bare pallas_call
        raise UsageError(
            "JAX cannot differentiate this function: provide its backward pass, pallas_op(jax_fn, vjp=...), or wrap it "
            f"in jax.custom_vjp. JAX's error: {type(error).__name__}: {str(error)[:300]}",
            code="bridge.not_differentiable",
        ) from error


def _with_vjp(function: Callable, vjp: Callable, call: BoundCall) -> Callable:
    """Return `function` as a jax.custom_vjp, so that JAX can differentiate vmaps of it; reruns the forward pass."""
    static = dict(call.static)

    @jax.custom_vjp
    def differentiable(*primals):
        return function(*primals, **static)

    def forward(*primals):
        outputs = function(*primals, **static)
        return outputs, (primals, tuple(jax.tree.leaves(outputs)))

    def backward(residuals, cotangents):
        primals, outputs = residuals
        given = [c if _floats(o) else None for c, o in zip(jax.tree.leaves(cotangents), outputs, strict=True)]
        gradients = vjp(primals, outputs, tuple(given), **static)
        return tuple(
            np.zeros(x.shape, jax.dtypes.float0) if not _floats(x) else jnp.zeros_like(x) if g is None else g
            for g, x in zip(gradients, primals, strict=True)
        )

    differentiable.defvjp(forward, backward)
    return differentiable


def _checked_gradient(i: int, gradient, primal):
    if gradient.shape != primal.shape or gradient.dtype != primal.dtype:
        raise UsageError(
            f"vjp's gradient {i} must have the shape and dtype of input {i}, {primal.dtype}{list(primal.shape)}; "
            f"got {gradient.dtype}{list(gradient.shape)}",
            code="bridge.vjp_shape",
            input=i,
        )
    return gradient


def _floats(array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.inexact)


def _check_declared(kernel: _Kernel, call: BoundCall, tensors, declared) -> None:
    inferred = [(tuple(shape), dtype) for shape, dtype in kernel.trace(call, tensors).outputs]
    if [(tuple(shape), dtype) for shape, dtype in declared] != inferred:
        message = f"{kernel.name}: output_shape_dtype_fn returned {list(declared)}, but the outputs are {inferred}"
        raise UsageError(message, code="bridge.declared_outputs")


def _function_name(function: Callable) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def _op_name(wanted: str) -> str:
    """Return a valid op name, unused like its backward op's name: the second `f` becomes `f_2`."""
    base = re.sub(r"\W", "_", wanted).strip("_") or "kernel"
    names = itertools.chain([base], (f"{base}_{i}" for i in itertools.count(2)))
    return next(n for n in names if not any(hasattr(torch.ops.vitkernels, op) for op in (n, f"{n}_backward")))
