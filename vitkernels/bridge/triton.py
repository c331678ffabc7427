"""Triton kernels on whatever the arguments are: CUDA tensors, CPU tensors (interpreted), JAX arrays on a GPU."""

import inspect
import threading
from contextlib import contextmanager
from functools import cache, partial
from types import FunctionType

import torch
from torch.library import wrap_triton

from vitkernels.bridge.operator import PLAIN, Remembered
from vitkernels.errors import UsageError

try:
    import triton
    import triton.compiler.code_generator  # copies parts of triton.language: not while the interpreter has changed them
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.jit import JITFunction
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError as error:  # there are no wheels for macOS and Windows
    raise UsageError("Triton is not installed: pip install 'vitkernels[cuda]' (Linux only)") from error

_LAUNCH_OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def triton_call(*args, kernel, grid, **constexprs):
    """Launches `kernel` over `grid` and returns None for tensors, the new output (or tuple of them) for JAX arrays.

    `args` are the kernel's run-time parameters in its own order: tensors, TensorDescriptors, numbers, None. Outputs are
    among them: tensors that the caller allocated and the kernel fills. `constexprs` are the kernel's `tl.constexpr`
    parameters by name, and launch options (num_warps, num_stages, num_ctas, maxnreg). `grid` is a tuple of one to
    three integers, or a function from the constexprs to one.

        output = torch.empty_like(x)
        triton_call(x, y, output, n, kernel=add_kernel, grid=(triton.cdiv(n, 1024),), BLOCK_SIZE=1024)

    CUDA tensors: compiled, eagerly and in torch.compile graphs; also inside a `torch.library.triton_op`.
    CPU tensors: Triton's interpreter, whether or not TRITON_INTERPRET is set; slow, for tests and small runs. In a
    torch.compile graph this breaks the graph; wrap it in a `torch.library.custom_op` to keep the graph whole.
    The interpreter has no bfloat16 arithmetic, so bfloat16 on the CPU is refused.
    JAX arrays: jax_triton, inside or outside jax.jit on a GPU. JAX arrays cannot be written to, so each output is a
    `jax.ShapeDtypeStruct` in the output's place. Numbers after the first output become constants of the kernel.

    Raises UsageError for tensors on several devices, on an XLA device, or on one that Triton does not know.
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
        # A tracer's tensors are subclasses: only they need the wrapped kernel, whose dispatch costs a millisecond.
        if any(type(x) not in PLAIN for x in tensors):
            wrap_triton(kernel)[grid](*args, **constexprs)
        elif torch.compiler.is_compiling():
            kernel[grid](*args, **constexprs)
        else:
            with torch.cuda.device(tensors[0].device):
                _launch(args, kernel, grid, constexprs, signature)
    else:
        _interpret(args, kernel, grid, constexprs)


def _tensors(args) -> list[torch.Tensor]:
    args = (arg.base if isinstance(arg, TensorDescriptor) else arg for arg in args)
    return [arg for arg in args if isinstance(arg, torch.Tensor)]


def _check_devices(tensors: list[torch.Tensor]) -> None:
    devices = sorted({str(x.device) for x in tensors})
    if len(devices) > 1:
        raise UsageError(f"a Triton kernel needs all of its tensors on one device, got {', '.join(devices)}")
    device_type = tensors[0].device.type
    if device_type == "xla":
        raise UsageError(
            "torch_xla dropped NVIDIA GPUs in release 2.8, and with them Triton kernels on XLA tensors. On a GPU pass "
            "plain CUDA tensors; on a TPU use a Pallas kernel through vitkernels.bridge.pallas_op"
        )
    if device_type not in ("cuda", "cpu"):
        raise UsageError(f"Triton runs on CUDA tensors, and interpreted on CPU tensors; got {device_type}")


# --- CUDA -------------------------------------------------------------------------------------------------------------
# Triton's own launch looks at every argument anew, for 40 to 90 µs of host time: more than a short kernel takes. Its
# cdiv and next_power_of_2, which are for kernels, cost 2 µs each.

_launches = Remembered()  # the signature of a call -> its launch, ready but for the arguments


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n, a positive integer."""
    return 1 << (n - 1).bit_length()


def bind(*args, kernel, grid, **constexprs):
    """Launches as triton_call does on CUDA tensors, eagerly; returns a function that launches it again on other ones.

    `args` are tensors (or None) first, then numbers. The function takes the tensors alone, or their addresses, of the
    same dtypes and 16-byte alignment; numbers, grid and constexprs stay, and so does the GPU, which has to be the
    current one whenever it is called. It costs a third of triton_call's host time.
    """
    launch, trailing = _compiled(args, kernel, grid, constexprs)
    tensors = next(i for i, arg in enumerate((*args, 0)) if not (arg is None or isinstance(arg, torch.Tensor)))
    rest = *args[tensors:], *trailing
    device = torch.cuda.current_device()
    return lambda *tensors: launch(*tensors, *rest, stream=torch._C._cuda_getCurrentRawStream(device))


def _signature(args, kernel, grid, constexprs) -> tuple | None:
    """All that decides over a launch but addresses and floats; None where Triton itself must look at the arguments."""
    if not isinstance(kernel, JITFunction):  # it may choose its constexprs
        return None
    # kernel.fn: the kernel's own hash is one of its source
    parts = [kernel.fn, grid(constexprs) if callable(grid) else grid, *constexprs.items()]
    for arg in args:
        kind = type(arg)
        if kind in PLAIN and arg.is_cuda:
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
    """Launches on the current device, and remembers how, where the call has a signature."""
    if signature is None:
        kernel[grid](*args, **constexprs)
        return
    device = torch.cuda.current_device()
    launch, trailing = _compiled(args, kernel, grid, constexprs)

    def again(args) -> None:
        if device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return again(args)
        launch(*args, *trailing, stream=torch._C._cuda_getCurrentRawStream(device))

    _launches[signature] = again


def _compiled(args, kernel, grid, constexprs):
    """Launches; returns the compiled kernel over this grid, and what it takes, and ignores, behind the arguments."""
    compiled = kernel[grid](*args, **constexprs)
    grid = grid(constexprs) if callable(grid) else grid
    return compiled[(*grid, 1, 1)[:3]], [constexprs.get(name) for name in kernel.arg_names[len(args) :]]


# --- Triton's interpreter ---------------------------------------------------------------------------------------------
# Triton decides for compiler or interpreter when a kernel is decorated, by an environment variable. Here the device
# decides, per call. The interpreter replaces functions in triton.language and does not always put them back (3.5 never
# does), which would break every later compilation in the process; so they are put back here.

_interpreter_lock = threading.RLock()  # the interpreter keeps its program ids in module globals


@torch.compiler.disable
def _interpret(args, kernel, grid, constexprs) -> None:
    tensors = _tensors(args)
    if any(type(x) not in (torch.Tensor, torch.nn.Parameter) for x in tensors):
        raise UsageError(
            "Triton's interpreter cannot be traced: on CPU tensors, put triton_call into a torch.library.custom_op "
            "with its own register_fake, not into a triton_op"
        )
    if any(x.dtype == torch.bfloat16 for x in tensors):
        raise UsageError("Triton's interpreter computes bfloat16 wrongly: on the CPU pass float32 or float16")
    constexprs = {name: value for name, value in constexprs.items() if name not in _LAUNCH_OPTIONS}
    with _interpreter_lock, _interpreting():
        if isinstance(kernel, JITFunction):
            kernel = interpreter.InterpretedFunction(_twin(kernel.fn))
        kernel[grid](*args, **constexprs)


@contextmanager
def _interpreting():
    """Lets the interpreter change triton.language, and device functions be called as plain Python; then undoes both."""
    spaces = (tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, JITFunction, interpreter)
    before = [dict(vars(space)) for space in spaces]
    try:
        with triton.knobs.runtime.scope():
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
    """Triton's own, and a loop bound that is a tensor of one element as an integer, which NumPy 2.4 refuses Triton."""
    scope = triton_patch_lang(fn)
    tl.tensor.__index__ = lambda self: self.handle.data.item()
    return scope


@cache
def _twin(fn: FunctionType) -> FunctionType:
    """`fn` over a copy of its globals, since the interpreter writes into them.

    Of Triton's own modules it changes those that it finds there; tl.core is the one that tl.sum and its like use.
    """
    scope = fn.__globals__ | {"_tl": tl, "_tl_core": tl.core}
    twin = FunctionType(fn.__code__, scope, fn.__name__, fn.__defaults__, fn.__closure__)
    twin.__kwdefaults__, twin.__annotations__ = fn.__kwdefaults__, fn.__annotations__
    return twin


@cache
def _plain(fn: FunctionType):
    return interpreter.InterpretedFunction(_twin(fn)).rewrite()


# --- JAX --------------------------------------------------------------------------------------------------------------


def _call_jax(args, kernel, grid, constexprs):
    if not any(type(arg).__module__.partition(".")[0] in ("jax", "jaxlib") for arg in args):
        kinds = ", ".join(type(arg).__name__ for arg in args) or "nothing"
        raise UsageError(f"triton_call needs at least one torch tensor or JAX array among its arguments, got {kinds}")
    try:
        import jax_triton
    except ImportError as error:
        raise UsageError(
            "Triton kernels on JAX arrays go through jax-triton, which is not installed: pip install 'jax-triton>=0.4'"
        ) from error
    # jax_triton wants the inputs in front; what follows the outputs it takes by name.
    is_output = [type(arg).__name__ == "ShapeDtypeStruct" for arg in args]
    if True not in is_output:
        raise UsageError("JAX arrays cannot be written to: pass a jax.ShapeDtypeStruct in each output's place")
    first = is_output.index(True)
    count = sum(is_output)
    if not all(is_output[first : first + count]):
        raise UsageError("with JAX arrays the kernel's outputs must stand side by side among its parameters")
    outputs, rest = args[first : first + count], args[first + count :]
    if any(hasattr(arg, "shape") for arg in rest):
        raise UsageError("with JAX arrays the kernel's outputs must come after all of its input arrays")
    names = list(inspect.signature(kernel.fn).parameters)[first + count :]
    constants = dict(zip(names, rest, strict=False))
    made = jax_triton.triton_call(*args[:first], kernel=kernel, out_type=outputs, grid=grid, **constants, **constexprs)
    return made[0] if count == 1 else tuple(made)
