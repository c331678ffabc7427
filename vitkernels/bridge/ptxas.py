"""Compile Mosaic-GPU modules for Hopper without a GPU, and read what ptxas reports of them.

A kernel that exceeds its registers spills them, or runs its matrix products one after the other (C7512 and the like).
Both are slow and neither is an error; ptxas only reports them.

JAX's CUDA plugin compiles the modules. It asks the CUDA driver for the device's compute capability, so a process of its
own loads a stand-in for libcuda.so.1, which a C compiler builds. Nothing is executed.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

_PLUGIN, _RUNTIME = "jax_plugins.xla_cuda13", "jax_cuda13_plugin"

# What the plugin calls. Attribute 75 is the major part of the compute capability, 76 the minor one.
_DRIVER = """
int cuCtxGetDevice(int *device) { *device = 0; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 75 ? 9 : 0; return 0; }
int cuModuleLoadData() { return 0; }
int cuModuleGetFunction() { return 0; }
int cuFuncSetAttribute() { return 0; }
"""

_COMPILE = """
import ctypes, os, sys
from pathlib import Path

library = ctypes.CDLL(sys.argv[1])
library.MosaicGpuCompile.argtypes = [ctypes.c_char_p, ctypes.c_int]
library.MosaicGpuCompile.restype = ctypes.c_void_p
for path in sys.argv[2:]:
    module = Path(path).read_bytes()
    os.write(1, b"\\n### module\\n")
    if not library.MosaicGpuCompile(module, len(module)):
        sys.exit(1)
"""


class Report(NamedTuple):
    """What ptxas reports of a kernel. Spills are bytes per thread."""

    spill_stores: int
    spill_loads: int
    serialized: bool  # some matrix products wait for each other
    text: str


def unavailable() -> str | None:
    """Return why this machine cannot compile for Hopper, with the fix; None if it can."""
    if importlib.util.find_spec(_RUNTIME) is None:  # which requires the other package
        return "JAX's CUDA plugin is not installed: pip install 'vitkernels[hopper]' (Linux, Python 3.12 or newer)"
    if _ptxas() is None:
        return "ptxas of CUDA 13 is in neither PyTorch nor the PATH: install PyTorch for CUDA 13, or the CUDA toolkit"
    if shutil.which("cc") is None:
        return "no C compiler: install one that is called as cc"
    return None


def reports(modules: list[bytes]) -> list[Report]:
    """Compile lowered modules (vitkernels.bridge.mosaic_gpu.mosaic_module) for Hopper; return ptxas's reports.

    Raises RuntimeError with the compiler's output if a module cannot be compiled, or with the reason if none can.
    """
    reason, ptxas = unavailable(), _ptxas()
    if reason is not None or ptxas is None:
        raise RuntimeError(reason)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "driver.c").write_text(_DRIVER)
        driver = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
        subprocess.run(driver, check=True)
        (folder / "bin").mkdir()
        (folder / "bin" / "ptxas").symlink_to(ptxas)
        paths = [folder / f"module{i}" for i in range(len(modules))]
        for path, module in zip(paths, modules, strict=True):
            path.write_bytes(module)
        environment = os.environ | {
            "LD_LIBRARY_PATH": ":".join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH")))),
            "MOSAIC_GPU_CUDA_ROOT": str(folder),
            "MOSAIC_GPU_RUNTIME_LIB_PATH": str(_folder(_RUNTIME) / "libmosaic_gpu_runtime.so"),
            "MOSAIC_GPU_DUMP_PTXAS": "1",
        }
        command = [sys.executable, "-c", _COMPILE, str(_folder(_PLUGIN) / "xla_cuda_plugin.so"), *map(str, paths)]
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
    if done.returncode:
        raise RuntimeError(f"Mosaic GPU could not compile a module:\n{done.stdout}")
    return [_parsed(text) for text in done.stdout.split("### module\n")[1:]]


def _parsed(text: str) -> Report:
    # Not those of the warning, which repeats them.
    spills = re.findall(r"bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", text)
    if not spills:
        raise RuntimeError(f"ptxas reported nothing:\n{text}")
    stores, loads = (sum(map(int, column)) for column in zip(*spills, strict=True))
    return Report(stores, loads, "serialized" in text, text)


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def _ptxas() -> str | None:
    """Return the path of ptxas of CUDA 13 or newer; PyTorch for CUDA 13 has one."""
    for path in (_folder("torch") / "bin" / "ptxas", shutil.which("ptxas")):
        if path is None or not Path(path).exists():
            continue
        version = subprocess.run([path, "--version"], capture_output=True, text=True).stdout
        if (found := re.search(r"release (\d+)", version)) and int(found[1]) >= 13:
            return str(path)
    return None
