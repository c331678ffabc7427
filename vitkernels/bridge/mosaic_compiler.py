"""Compile Mosaic-GPU modules in background threads; importable without jax.

A kernel takes seconds to compile, and a training step uses several. MosaicGpuCompile may run in several threads: each
call has its own MLIR context, and XLA's lock on LLVM's options admits all callers with equal options. ctypes releases
Python's global lock during the call.
"""

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial

from vitkernels.bridge.cuda_context import enter_primary_context, load_modules_during_captures

Launch = Callable[[int, ctypes.Array], None]  # (stream, argument pointers)

# Enough for the kernels of a model's step; they start when they are first needed. At exit the interpreter waits for
# them, as it must: C++ destructors would run during a compilation.
THREADS = min(8, os.cpu_count() or 1)
_threads = ThreadPoolExecutor(THREADS, thread_name_prefix="mosaic-gpu")


def start(module: bytes, device: int) -> Future[Launch]:
    """Start to compile the module for the CUDA device with this index; the future has its launch function.

    The future raises RuntimeError if Mosaic GPU cannot compile the module.
    """
    return _threads.submit(_compile, module, device)


def _compile(module: bytes, device: int) -> Launch:
    enter_primary_context(device)
    load_modules_during_captures()
    compiled = _library().MosaicGpuCompile(module, len(module))
    if not compiled:
        raise RuntimeError("Mosaic GPU failed to compile the kernel; see its output above")
    function, address = compiled[0], compiled[1]
    launch = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(address)
    return partial(launch, function)


@cache
def _library() -> ctypes.CDLL:
    try:
        import jax_plugins.xla_cuda13 as plugin
    except ImportError:
        import jax_plugins.xla_cuda12 as plugin
    library = ctypes.CDLL(plugin._get_library_path())
    library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
    library.MosaicGpuCompile.restype = ctypes.POINTER(ctypes.c_void_p)
    return library
