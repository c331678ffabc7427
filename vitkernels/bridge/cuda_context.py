"""Preserve a thread's CUDA context across calls that may switch it; importable without jax."""

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


@cache
def _cuda_driver() -> ctypes.CDLL | None:
    return ctypes.CDLL("libcuda.so.1") if torch.cuda.is_available() else None
