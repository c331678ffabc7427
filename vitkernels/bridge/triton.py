"""Launch Triton kernels on CUDA tensors, on CPU tensors (interpreted) and on JAX arrays on a GPU."""

import inspect
import threading
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType

import numpy as np
import torch
from torch.library import wrap_triton

from vitkernels.bridge import interpreted
from vitkernels.bridge.operator import PLAIN_TYPES, BoundedCache
from vitkernels.errors import UsageError

try:
    import triton
    import triton.compiler.code_generator  # copies triton.language names: import before the interpreter patches them
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.errors import OutOfResources
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:  # no wheels exist for macOS and Windows
    message = "Triton is not installed: pip install 'vitkernels[cuda]' (Linux only)"
    raise UsageError(message, code="bridge.missing_package", package="triton") from error

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


def triton_call(*args, kernel, grid, **constexprs):
    """Launch `kernel` over `grid`. Return None for tensors, the new output (or tuple of outputs) for JAX arrays.

    Args:
        args: the kernel's run-time parameters in order: tensors, TensorDescriptors, numbers, None. They include the
            outputs, tensors that the caller allocates and the kernel fills.
        grid: a tuple of one to three integers, or a function that computes it from the constexprs.
        constexprs: the kernel's `tl.constexpr` parameters by name, and launch options (num_warps, num_stages, num_ctas,
            maxnreg, enable_fp_fusion).

        output = torch.empty_like(x)
        triton_call(x, y, output, n, kernel=add_kernel, grid=(triton.cdiv(n, 1024),), BLOCK_SIZE=1024)

    CUDA tensors: runs compiled, both eagerly and in torch.compile graphs, and inside a `torch.library.triton_op`.
    CPU tensors: runs in Triton's interpreter, whether or not TRITON_INTERPRET is set; slow, for tests and small runs.
    It breaks torch.compile graphs; wrap the call in a `torch.library.custom_op` to avoid the break. The interpreter has
    no bfloat16 arithmetic, so bfloat16 CPU tensors raise UsageError.
    JAX arrays: runs through jax_triton, inside or outside jax.jit on a GPU. JAX arrays are immutable, so pass a
    `jax.ShapeDtypeStruct` for each output. Numbers after the first output become constants of the kernel.

    Raises UsageError for tensors on several devices, on an XLA device, or on a device that Triton does not support.
    """
    if not torch.compiler.is_compiling():
        signature = _signature(args, kernel, grid, constexprs)
        if signature in _launches:
            return _launches[signature](args)
    tensors = _tensors(args)
    if not tensors:
        return _call_jax(args, kernel, grid, constexprs)
    _check_devices(tensors)
    if tensors[0].device.type == "cuda":
        # Only a tracer's tensors, which are subclasses, need the wrapped kernel; its dispatch costs a millisecond.
        if any(type(x) not in PLAIN_TYPES for x in tensors):
            wrap_triton(kernel)[grid](*args, **constexprs)
        elif torch.compiler.is_compiling():
            kernel[grid](*args, **constexprs)
        else:
            with torch.cuda.device(tensors[0].device):
                _launch(args, kernel, grid, constexprs, signature)
    else:
        _interpret(args, kernel, grid, constexprs)


def with_fitting_stages(launch, stages: int) -> None:
    """Call `launch` with `stages` pipeline stages, or with the most below that whose tiles fit into shared memory."""
    while True:
        try:
            launch(stages)
            return
        except OutOfResources:
            if stages == 1:
                raise
            stages -= 1


def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 2 for the interpreter, so that it runs more than one program."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _tensors(args) -> list[torch.Tensor]:
    args = (arg.base if isinstance(arg, TensorDescriptor) else arg for arg in args)
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _check_devices(tensors: list[torch.Tensor]) -> None:
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        message = f"a Triton kernel needs all of its tensors on one device, got {', '.join(devices)}"
        raise UsageError(message, code="bridge.mixed_devices", devices=devices)
    device_type = tensors[0].device.type
    if device_type == "xla":
        raise UsageError(
            "torch_xla dropped NVIDIA GPUs in release 2.8, and with them Triton kernels on XLA tensors. On a GPU pass "
            "plain CUDA tensors; on a TPU use a Pallas kernel through vitkernels.bridge.pallas_op",
            code="bridge.device",
            device=device_type,
        )
    if device_type not in ("cuda", "cpu"):
        message = f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {device_type}"
        raise UsageError(message, code="bridge.device", device=device_type)


# --- CUDA -------------------------------------------------------------------------------------------------------------
# Triton's launch inspects every argument on each call, which takes 40 to 90 µs of host time: longer than a short kernel
# runs. Its cdiv and next_power_of_2, made for kernels, take 2 µs each on the host.

_launches = BoundedCache()  # call signature -> a launch that only needs the arguments


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n, a positive integer."""
    return 1 << (n - 1).bit_length()


def bind(*args, kernel, grid, **constexprs):
    """Launch eagerly on CUDA tensors, as triton_call does; return a function that relaunches on other tensors.

    `args` are tensors, Gluon's TensorDescriptors or None first, then numbers. The returned function takes only the
    tensors, or their addresses, with the same dtypes and 16-byte alignment; for a descriptor, a tensor of its shape and
    strides. Numbers, grid and constexprs are fixed. The same GPU must be current at each call. A relaunch costs a third
    of triton_call's host time.
    """
    launch, trailing = _compiled(args, kernel, grid, constexprs)
    kinds = [_kind(arg) for arg in (*args, 0)]
    count = kinds.index("number")
    rest = *args[count:], *trailing
    device = torch.cuda.current_device()
    # Not the descriptors themselves, which would keep the tensors of this call.
    described = [(i, x.shape, x.strides, x.padding) for i, x in enumerate(args[:count]) if kinds[i] == "descriptor"]

    def relaunch(*tensors) -> None:
        given = list(tensors)
        for i, *layout in described:
            given[i] = _Described(given[i], *layout)
        launch(*given, *rest, stream=torch._C._cuda_getCurrentRawStream(device))

    return relaunch


def _kind(arg) -> str:
    if arg is None or isinstance(arg, torch.Tensor):
        return "tensor"
    return "descriptor" if type(arg).__name__ == "TensorDescriptor" else "number"


class _Address(int):
    def data_ptr(self) -> int:
        return self


class _Described:
    """What Triton's launcher reads of a TensorDescriptor. Making one of those would check everything again."""

    __slots__ = ("base", "padding", "shape", "strides")

    def __init__(self, base: torch.Tensor | int, shape, strides, padding):
        self.base = _Address(base) if isinstance(base, int) else base
        self.shape, self.strides, self.padding = shape, strides, padding


def _signature(args, kernel, grid, constexprs) -> tuple | None:
    """Return everything a launch depends on except addresses and floats; None if Triton must inspect the arguments."""
    if not isinstance(kernel, JITFunction):  # an autotuner chooses its constexprs per call
        return None
    # kernel.fn, because hashing the kernel hashes its source
    parts = [kernel.fn, grid(constexprs) if callable(grid) else grid, *constexprs.items()]
    for arg in args:
        kind = type(arg)
        if kind in PLAIN_TYPES and arg.is_cuda:
            parts += arg.dtype, arg.get_device(), arg.data_ptr() % 16
        elif kind is int:
            parts.append(arg)
        elif kind is float:
            parts.append(float)
        elif kind is bool or arg is None:
            parts += kind, arg
        elif kind is TensorDescriptor and arg.base.is_cuda:
            parts += arg.base.dtype, arg.base.get_device(), arg.padding, *arg.block_shape
        else:
            return None
    return tuple(parts)


def _launch(args, kernel, grid, constexprs, signature: tuple | None) -> None:
    """Launch on the current device; cache the launch if the call has a signature."""
    if signature is None:
        kernel[grid](*args, **constexprs)
        return
    device = torch.cuda.current_device()
    launch, trailing = _compiled(args, kernel, grid, constexprs)

    def relaunch(args) -> None:
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return relaunch(args)
        launch(*args, *trailing, stream=torch._C._cuda_getCurrentRawStream(device))

    _launches[signature] = relaunch


def _compiled(args, kernel, grid, constexprs):
    """Launch; return the compiled kernel bound to this grid, and the trailing constexprs it accepts and ignores."""
    compiled = kernel[grid](*args, **constexprs)
    grid = grid(constexprs) if callable(grid) else grid
    return compiled[(*grid, 1, 1)[:3]], [constexprs.get(name) for name in kernel.arg_names[len(args) :]]


# --- Triton's interpreter ---------------------------------------------------------------------------------------------
# Triton chooses compiler or interpreter when a kernel is decorated, by an environment variable. The bridge chooses per
# call, by device. The interpreter patches triton.language and does not always undo it (3.5 never does), which would
# break every later compilation in the process, so the bridge restores it.

_interpreter_lock = threading.RLock()  # the interpreter keeps program ids in module globals


@torch.compiler.disable
def _interpret(args, kernel, grid, constexprs) -> None:
    tensors = _tensors(args)
    if any(type(x) not in PLAIN_TYPES for x in tensors):
        raise UsageError(
            "Triton's interpreter cannot be traced: on CPU tensors, wrap triton_call in a torch.library.custom_op with "
            "its own register_fake, not in a triton_op",
            code="bridge.interpreter_traced",
        )
    if any(x.dtype == torch.bfloat16 for x in tensors):
        message = "Triton's interpreter computes bfloat16 incorrectly: on the CPU pass float32 or float16"
        raise UsageError(message, code="bridge.interpreter_bfloat16")
    interpreted.note(interpreted.TRITON)
    constexprs = {name: value for name, value in constexprs.items() if name not in _LAUNCH_OPTIONS}
    with _interpreter_lock, _interpreting():
        if isinstance(kernel, JITFunction):
            kernel = interpreter.InterpretedFunction(_with_own_globals(kernel.fn))
        kernel[grid](*args, **constexprs)


@contextmanager
def _interpreting():
    """Let the interpreter patch triton.language and call device functions as plain Python; undo both on exit."""
    spaces = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, JITFunction, interpreter)
    before = [dict(vars(space)) for space in spaces]
    try:
        with triton.knobs.runtime.scope(), np.errstate(over="ignore"):  # a GPU overflows to infinity without a warning
            triton.knobs.runtime.interpret = True
            JITFunction.__call__ = lambda self, *args, **keywords: _plain(self.fn)(*args, **keywords)
            interpreter._patch_lang = partial(_patch_lang, interpreter._patch_lang)
            yield
    finally:
        for space, names in zip(spaces, before, strict=True):
            for name in vars(space).keys() - names.keys():
                delattr(space, name)
            for name, value in names.items():
                if vars(space)[name] is not value:
                    setattr(space, name, value)


def _patch_lang(triton_patch_lang, fn):
    """Patch as Triton does, and make one-element tensors usable as loop bounds, which NumPy 2.4 rejects."""
    scope = triton_patch_lang(fn)
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    return scope


@cache
def _with_own_globals(fn: FunctionType) -> FunctionType:
    """Return `fn` over a copy of its globals, because the interpreter writes into them.

    The interpreter patches the Triton modules it finds there; tl.sum and similar functions need tl.core.
    """
    scope = fn.__globals__ | {"_tl": tl, "_tl_core": tl.core}
    twin = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__, twin.__annotations__ = fn.__kwdefaults__, fn.__annotations__
    return twin


@cache
def _plain(fn: FunctionType):
    return interpreter.InterpretedFunction(_with_own_globals(fn)).rewrite()


# --- JAX --------------------------------------------------------------------------------------------------------------


def _call_jax(args, kernel, grid, constexprs):
    if not any(type(arg).__module__.partition(".")[0] in ("jax", "jaxlib") for arg in args):
        kinds = ", ".join(type(arg).__name__ for arg in args) or "nothing"
        message = f"triton_call needs at least one torch tensor or JAX array among its arguments, got {kinds}"
        raise UsageError(message, code="bridge.no_tensor")
    try:
        import jax_triton
    except ImportError as error:
        raise UsageError(
            "Triton kernels on JAX arrays need jax-triton, which is not installed: pip install 'jax-triton>=0.4'",
            code="bridge.missing_package",
            package="jax-triton",
        ) from error
    # jax_triton takes the inputs by position and everything after the outputs by name.
    is_output = [type(arg).__name__ == "ShapeDtypeStruct" for arg in args]
    if True not in is_output:
        message = "JAX arrays are immutable: pass a jax.ShapeDtypeStruct in place of each output"
        raise UsageError(message, code="bridge.jax_outputs")
    first = is_output.index(True)
    count = sum(is_output)
    if not all(is_output[first : first + count]):
        message = "with JAX arrays the kernel's outputs must be adjacent in its parameter list"
        raise UsageError(message, code="bridge.jax_output_order")
    outputs, rest = args[first : first + count], args[first + count :]
    if any(hasattr(arg, "shape") for arg in rest):
        message = "with JAX arrays the kernel's outputs must follow all of its input arrays"
        raise UsageError(message, code="bridge.jax_output_order")
    names = list(inspect.signature(kernel.fn).parameters)[first + count :]
    constants = dict(zip(names, rest, strict=False))
    made = jax_triton.triton_call(*args[:first], kernel=kernel, out_type=outputs, grid=grid, **constants, **constexprs)
    return made[0] if count == 1 else tuple(made)
