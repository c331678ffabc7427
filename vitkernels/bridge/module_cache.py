"""Keep lowered Mosaic-GPU modules on disk, because lowering a kernel takes up to half a second of Python.

A file's name covers everything that a module depends on: the kernel with its fields, the shapes of its arguments, the
source of this package, the version of JAX and the options that change what Mosaic GPU lowers. The files are in the
folder of torch.compile's cache (TORCHINDUCTOR_CACHE_DIR).
"""

import contextlib
import dataclasses
import hashlib
import inspect
import os
import platform
import uuid
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import jax
import jaxlib
import torch

import vitkernels

_DIGEST = 32  # bytes of a SHA-256
_JAX_OPTIONS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")


def cached(lower: Callable[..., bytes], function: Callable, shapes: Sequence[jax.ShapeDtypeStruct]) -> bytes:
    """Return lower(function, shapes), from disk if it was lowered before.

    Only a dataclass of this package that can be called, or a method of one, has a description for the file's name;
    other functions are lowered each time. So is a module whose file is damaged. If the folder cannot be written,
    nothing is kept.
    """
    described = _description(function)
    if described is None:
        return lower(function, shapes)
    path = _folder() / hashlib.sha256(repr((described, shapes, _versions())).encode()).hexdigest()
    with contextlib.suppress(OSError):
        digest, module = _split(path.read_bytes())
        if digest == hashlib.sha256(module).digest():
            return module
    module = lower(function, shapes)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        # Processes that train together lower the same kernels at the same time.
        temporary = path.with_suffix(f".{uuid.uuid4().hex}")
        temporary.write_bytes(hashlib.sha256(module).digest() + module)
        os.replace(temporary, path)
    return module


def _split(content: bytes) -> tuple[bytes, bytes]:
    return content[:_DIGEST], content[_DIGEST:]


def _description(function: Callable) -> tuple[str, ...] | None:
    """Return a kernel's class, fields and method; None if `function` is no such kernel of this package."""
    kernel = getattr(function, "__self__", function)
    kind = type(kernel)
    if not dataclasses.is_dataclass(kernel) or not kind.__module__.startswith("vitkernels."):
        return None
    assert all(field.repr for field in dataclasses.fields(kernel)), "a field is missing in the description"
    method = function.__name__ if inspect.ismethod(function) else "__call__"
    return kind.__module__, repr(kernel), method


@cache
def _versions() -> tuple[str, ...]:
    """Return what all modules depend on, in addition to the kernel and its arguments."""
    source = hashlib.sha256()
    root = Path(vitkernels.__file__).parent
    for path in sorted(root.rglob("*.py")):
        source.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    gpu = str(torch.cuda.get_device_capability()) if torch.cuda.is_available() else ""
    options = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("MOSAIC_")]
    options += [f"{name}={value}" for name, value in sorted(jax.config.values.items()) if name in _JAX_OPTIONS]
    return source.hexdigest(), jax.__version__, jaxlib.__version__, platform.python_version(), gpu, *options


def _folder() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir()) / "mosaic_gpu"
