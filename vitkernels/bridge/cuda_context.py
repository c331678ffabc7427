"""Set a thread's CUDA context, or preserve it across calls that may switch it; importable without jax."""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def preserved_cuda_context() -> Iterator[None]:
    """Restore this thread's current CUDA context on exit; do nothing on a machine without a GPU.

    JAX initializes every visible GPU and can leave another GPU's context current. Torch would then launch its kernels
    in the wrong context ("invalid resource handle").
    """
    driver = _cuda_driver()
    if driver is None:
        yield
        return
    context = ctypes.c_void_p()  # stays null if the thread has no context or CUDA is not initialized
    driver.cuCtxGetCurrent(ctypes.byref(context))
    try:
        yield
    finally:
        driver.cuCtxSetCurrent(context)


def enter_primary_context(device: int) -> None:
    """Make the primary context of the GPU with this index, which torch uses, current in this thread."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuInit", 0)
    _call("cuDeviceGet", ctypes.byref(handle), device)
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    _call("cuCtxSetCurrent", context)


def load_modules_during_captures() -> None:
    """Let this thread load modules while another thread captures a CUDA graph.

    By default CUDA refuses that during a capture in the mode "global", and the capture fails, too.
    """
    _call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(2)))  # CU_STREAM_CAPTURE_MODE_RELAXED


def _call(function: str, *arguments) -> None:
    driver = _cuda_driver()
    if driver is None:
        raise RuntimeError("torch sees no CUDA device")
    status = getattr(driver, function)(*arguments)
    if status:
        raise RuntimeError(f"{function} failed with CUDA error {status}")


@cache
def _cuda_driver() -> ctypes.CDLL | None:
    return ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None
