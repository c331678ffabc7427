"""All that the bridge needs from JAX beyond its stable surface, for jax 0.7.1 (the tpu extra) up to 0.11 and 0.12.

Importing this module imports jax, and before any backend of it starts, closes the TPU to it: a process's TPU belongs to
torch_xla, and a JAX that opens it first makes every later torch_xla call hang. The bridge never needs JAX to hold the
TPU, because it lowers for it (`hlo_module`) and lets torch_xla compile and run the result.
"""

import ctypes
import os
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from vitkernels.errors import UsageError

try:
    import jax
except ImportError as error:
    raise ImportError(
        "Pallas kernels need jax: pip install 'vitkernels[tpu]' on a TPU machine (jax 0.7.1 beside torch_xla 2.9), "
        "or pip install jax (jax[cuda13] on an NVIDIA GPU) elsewhere"
    ) from error

import jax.extend.core as jex_core

TPU_TAKEN = (
    "JAX has opened the TPU in this process, so torch_xla cannot use it (its calls would hang). JAX was started before "
    "vitkernels.bridge could close the TPU to it. Mend it either way: import vitkernels.bridge before the first JAX "
    "call that touches a device (jax.devices(), any computation), or start Python with JAX_PLATFORMS=cpu."
)
TPU_ASKED = (
    "JAX was told to open the TPU (jax_platforms or JAX_PLATFORMS is {platforms!r}), which belongs to torch_xla in "
    "this process. Unset it or set JAX_PLATFORMS=cpu: the bridge lowers kernels for the TPU without opening it."
)


def close_tpu(torch_xla_in_use: bool | None = None) -> None:
    """Keep JAX off the TPU; call it before every use of JAX: it costs a few microseconds.

    `torch_xla_in_use` says whether this process runs torch_xla; None looks whether it was imported.
    Raises UsageError when torch_xla is in use and JAX already holds the TPU, or was told to take it.
    """
    if torch_xla_in_use is None:
        torch_xla_in_use = "torch_xla" in sys.modules
    platforms = jax.config.jax_platforms
    if not _started_backends():
        if not platforms:
            _choose_platforms()
        elif torch_xla_in_use and "tpu" in platforms.split(","):
            raise UsageError(TPU_ASKED.format(platforms=platforms))
    elif torch_xla_in_use and "tpu" in _started_backends():
        raise UsageError(TPU_TAKEN)


def _choose_platforms() -> None:
    """The platforms JAX would choose by itself, without the TPU."""
    if torch.cuda.is_available() and has_cuda_plugin():
        # Beside torch, JAX must not take three quarters of the GPU's memory at its first call.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        jax.config.update("jax_platforms", "cuda,cpu")
        # torchrun's processes have one GPU each; JAX would open every GPU in every one of them.
        if "LOCAL_RANK" in os.environ and "JAX_CUDA_VISIBLE_DEVICES" not in os.environ:
            jax.config.update("jax_cuda_visible_devices", os.environ["LOCAL_RANK"])
    else:
        jax.config.update("jax_platforms", "cpu")


def start() -> None:
    """Start JAX's backends, which its first lowering would do."""
    if not _started_backends():
        with keeping_cuda_context():
            jax.local_devices()


@contextmanager
def keeping_cuda_context() -> Iterator[None]:
    """Puts this thread's CUDA context back. JAX opens every GPU that it sees and can leave another one's context
    behind, in which torch would go on launching kernels ("invalid resource handle")."""
    driver = _cuda_driver()
    if driver is None:
        yield
        return
    context = ctypes.c_void_p()  # stays null where the thread has none, or CUDA was not started yet
    driver.cuCtxGetCurrent(ctypes.byref(context))
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(context)


@cache
def _cuda_driver() -> ctypes.CDLL | None:
    return ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None


def has_cuda_plugin() -> bool:
    try:
        import jax_plugins
    except ImportError:
        return False
    return any("cuda" in module.name for module in pkgutil.iter_modules(jax_plugins.__path__))


def _started_backends() -> dict:
    """The backends JAX has started, by platform; looking must not start one, and no public call looks without."""
    from jax._src import xla_bridge

    return xla_bridge._backends if xla_bridge.backends_are_initialized() else {}


def interpreted(jaxpr):
    """The same closed jaxpr with each Pallas kernel in it run by the interpreter (plain XLA operations).

    Rewriting the trace leaves the user's function alone: it need not take an `interpret` argument.
    """
    if isinstance(jaxpr, jex_core.Jaxpr):  # from jax 0.11 on, closed jaxprs are of this class too
        return jaxpr.replace(eqns=[_interpreted_equation(equation) for equation in jaxpr.eqns])
    return jex_core.ClosedJaxpr(interpreted(jaxpr.jaxpr), jaxpr.consts)


def _interpreted_equation(equation):
    if "interpret" in equation.params:  # pallas_call and core_map
        return equation.replace(params={**equation.params, "interpret": equation.params["interpret"] or True})
    params = {name: _interpreted_param(value) for name, value in equation.params.items()}
    return equation.replace(params=params)


def _interpreted_param(value):
    if isinstance(value, jex_core.Jaxpr | jex_core.ClosedJaxpr):
        return interpreted(value)
    if isinstance(value, tuple) and any(isinstance(x, jex_core.Jaxpr | jex_core.ClosedJaxpr) for x in value):
        return tuple(map(_interpreted_param, value))  # the branches of a cond
    return value


def hlo_module(function, shapes, platform: str) -> bytes:
    """`function` on `shapes`, lowered for "tpu", "cpu" or "cuda" without that device: a serialized HLO module."""
    start()
    # Unused inputs stay, so that the module takes exactly the tensors it is called with.
    lowered = jax.jit(function, keep_unused=True).trace(*shapes).lower(lowering_platforms=(platform,))
    return lowered.compiler_ir("hlo").as_serialized_hlo_module_proto()


def mosaic_gpu_kernel(function, shapes):
    """`function` on `shapes` as a Mosaic-GPU kernel to launch on torch tensors (bridge/mosaic_gpu.py); None where it is
    not one such kernel and nothing else, and where this jax is too old (before 0.11)."""
    if jax.__version_info__ < (0, 11):
        return None
    from vitkernels.bridge.mosaic_gpu import Kernel

    try:
        return Kernel(function, shapes)
    except (ValueError, NotImplementedError):
        return None


close_tpu()
