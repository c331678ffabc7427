"""Everything the bridge needs from JAX beyond its stable API, for jax 0.7.1 (the tpu extra) through 0.12.

Importing this module imports jax and, before any JAX backend initializes, removes the TPU from JAX's platforms. A
process's TPU belongs to torch_xla; if JAX opens it first, every later torch_xla call hangs. The bridge never needs JAX
to hold the TPU: it lowers kernels for it (`hlo_module`) and torch_xla compiles and runs the result.
"""

import os
import pkgutil
import sys
from platform import machine

import torch

from vitkernels.bridge.cuda_context import preserved_cuda_context
from vitkernels.bridge.interpreted import PALLAS, note
from vitkernels.errors import UsageError

try:
    import jax
except ImportError as error:
    raise ImportError(
        "Pallas kernels need jax: pip install 'vitkernels[tpu]' on a TPU machine (jax 0.7.1 with torch_xla 2.9), "
        "or pip install jax (jax[cuda13] on an NVIDIA GPU) elsewhere"
    ) from error

import jax.extend.core as jex_core

TPU_TAKEN = (
    "JAX has opened the TPU in this process, so torch_xla calls would hang: JAX initialized before vitkernels.bridge "
    "could remove the TPU from its platforms. Import vitkernels.bridge before the first JAX call that touches a device "
    "(jax.devices(), any computation), or start Python with JAX_PLATFORMS=cpu."
)
TPU_REQUESTED = (
    "JAX is configured to open the TPU (jax_platforms or JAX_PLATFORMS is {platforms!r}), but torch_xla owns the TPU "
    "in this process. Unset it or set JAX_PLATFORMS=cpu: the bridge lowers kernels for the TPU without opening it."
)


def keep_jax_off_tpu(torch_xla_in_use: bool | None = None) -> None:
    """Keep JAX off the TPU. Call before every use of JAX; costs a few microseconds.

    Args:
        torch_xla_in_use: whether this process runs torch_xla; None checks whether it has been imported.

    Raises UsageError if torch_xla is in use and JAX already holds the TPU or is configured to open it.
    """
    if torch_xla_in_use is None:
        torch_xla_in_use = "torch_xla" in sys.modules
    platforms = jax.config.jax_platforms  # type: ignore[attr-defined]  # JAX defines its options at run time
    if not _initialized_backends():
        if not platforms:
            _choose_platforms()
        elif torch_xla_in_use and "tpu" in platforms.split(","):
            message = TPU_REQUESTED.format(platforms=platforms)
            raise UsageError(message, code="bridge.tpu_requested", platforms=platforms)
    elif torch_xla_in_use and "tpu" in _initialized_backends():
        raise UsageError(TPU_TAKEN, code="bridge.tpu_taken")


def _choose_platforms() -> None:
    """Select the platforms JAX would choose by default, minus the TPU."""
    if torch.cuda.is_available() and has_cuda_plugin():
        # JAX shares the GPU with torch and must not preallocate three quarters of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax.config.update("jax_platforms", "cuda,cpu")
        # Each torchrun process owns one GPU; without this, JAX would open all GPUs in every process.
        if "LOCAL_RANK" in os.environ and "JAX_CUDA_VISIBLE_DEVICES" not in os.environ:
            jax.config.update("jax_cuda_visible_devices", os.environ["LOCAL_RANK"])
    else:
        jax.config.update("jax_platforms", "cpu")


def initialize_backends() -> None:
    """Initialize JAX's backends now, preserving the CUDA context, instead of at the first lowering."""
    if not _initialized_backends():
        with preserved_cuda_context():
            jax.local_devices()


def has_cuda_plugin() -> bool:
    """Return whether JAX's CUDA plugin is installed."""
    try:
        import jax_plugins
    except ImportError:
        return False
    return any("cuda" in module.name for module in pkgutil.iter_modules(jax_plugins.__path__))


def _initialized_backends() -> dict:
    """Return JAX's initialized backends by platform; every public call that lists them initializes them first."""
    from jax._src import xla_bridge

    return xla_bridge._backends if xla_bridge.backends_are_initialized() else {}


def interpreted(jaxpr):
    """Return the closed jaxpr with each Pallas kernel set to run in the interpreter (plain XLA operations).

    Rewriting the trace leaves the user's function unchanged: it does not need an `interpret` argument.
    """

    def interpret(given):
        note(PALLAS)
        return given or True

    return _with_interpret(jaxpr, interpret)


def compiled(jaxpr):
    """Return the closed jaxpr with each Pallas kernel set to be compiled, even if the user's function interprets it."""
    return _with_interpret(jaxpr, lambda given: False)


def _with_interpret(part, change):
    """Return a jaxpr with the `interpret` of each kernel, at any depth, replaced by change(interpret)."""
    if isinstance(part, jex_core.Jaxpr):  # since jax 0.11 closed jaxprs are of this class too
        return part.replace(eqns=[_equation_with_interpret(equation, change) for equation in part.eqns])
    if isinstance(part, jex_core.ClosedJaxpr):
        return jex_core.ClosedJaxpr(_with_interpret(part.jaxpr, change), part.consts)
    if isinstance(part, tuple) and any(isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr) for x in part):
        return tuple(_with_interpret(x, change) for x in part)  # the branches of a cond
    return part


def _equation_with_interpret(equation, change):
    if "interpret" in equation.params:  # pallas_call and core_map
        return equation.replace(params={**equation.params, "interpret": change(equation.params["interpret"])})
    return equation.replace(params={name: _with_interpret(value, change) for name, value in equation.params.items()})


def jit_on_cpu(function):
    """Return `jax.jit(function)` for the CPU, with bfloat16 products that run and agree on every x86 processor.

    For processors with bfloat16 instructions, XLA keeps bfloat16 dots that its runtime cannot execute ("Unsupported
    element type for DotThunk::Execute: BF16 x BF16 = F32"). For others it multiplies in float32, which is exact. A
    limit in XLA_FLAGS stays in force.
    """
    limited = "xla_cpu_max_isa" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_max_isa": "AVX512"} if machine() == "x86_64" and not limited else None
    return jax.jit(function, compiler_options=options)


def hlo_module(function, shapes, platform: str) -> bytes:
    """Lower `function` on `shapes` for "tpu", "cpu" or "cuda"; return a serialized HLO module.

    The target device need not be present.
    """
    initialize_backends()
    # Keep unused inputs, so that the module's parameters match the tensors it is called with.
    lowered = jax.jit(function, keep_unused=True).trace(*shapes).lower(lowering_platforms=(platform,))
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


keep_jax_off_tpu()
