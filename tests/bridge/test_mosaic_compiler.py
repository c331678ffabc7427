"""Mosaic-GPU modules compile in background threads; the plugin's library and the driver are stubs."""

import ctypes
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hopper import needs_new_jax

from vitkernels.bridge import cuda_context, mosaic_compiler

LAUNCH = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Library:
    """Compile by calling `work`; the compiled kernel has the handle 7 and appends its arguments to `launches`."""

    def __init__(self, work=lambda module: True):
        self.work, self.launches = work, []
        self._launch = LAUNCH(lambda *arguments: self.launches.append(arguments))

    def MosaicGpuCompile(self, module, size):
        assert len(module) == size
        address = ctypes.cast(self._launch, ctypes.c_void_p).value
        return (7, address) if self.work(module) else None


class Driver:
    """Record the calls of each thread; `failing` returns an error."""

    def __init__(self):
        self.calls, self.failing = {}, None

    def __getattr__(self, name):
        def call(*arguments):
            self.calls.setdefault(threading.get_ident(), []).append((name, *arguments))
            return 201 if name == self.failing else 0

        return call


@pytest.fixture
def driver(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(cuda_context, "_cuda_driver", lambda: driver)
    return driver


@pytest.fixture
def library(monkeypatch, driver):
    library = Library()
    monkeypatch.setattr(mosaic_compiler, "_library", lambda: library)
    return library


def test_start__compiles_several_modules_at_once(library):
    together = threading.Barrier(mosaic_compiler.THREADS)
    library.work = lambda module: together.wait(timeout=20) >= 0  # raises unless all threads come
    futures = [mosaic_compiler.start(bytes([i]), 0) for i in range(2 * mosaic_compiler.THREADS)]
    assert all(callable(future.result(timeout=60)) for future in futures)


def test_start__runs_a_bounded_number_of_compilations(library):
    lock, running, most = threading.Lock(), set(), []

    def work(module):
        with lock:
            running.add(module)
            most.append(len(running))
        time.sleep(0.02)
        with lock:
            running.remove(module)
        return True

    library.work = work
    for future in [mosaic_compiler.start(bytes([i]), 0) for i in range(30)]:
        future.result(timeout=60)
    assert max(most) == mosaic_compiler.THREADS <= 8


def test_start__failure_is_raised_by_each_wait_and_stays_with_its_module(library):
    library.work = lambda module: module != b"bad"
    bad, good = (mosaic_compiler.start(module, 0) for module in (b"bad", b"good"))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Mosaic GPU failed to compile the kernel"):
            bad.result(timeout=20)
    assert callable(good.result(timeout=20))


def test_start__thread_has_the_context_of_its_device(library, driver):
    found = {}

    def work(module):
        calls = driver.calls[threading.get_ident()][-5:]
        found[module] = [name for name, *_ in calls], calls[1][2]
        return True

    library.work = work
    for future in [mosaic_compiler.start(bytes([device]), device) for device in (0, 3, 1)]:
        future.result(timeout=20)
    entered = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxSetCurrent"]
    assert found == {bytes([device]): ([*entered, "cuThreadExchangeStreamCaptureMode"], device) for device in (0, 3, 1)}


def test_start__error_of_the_driver_is_raised_by_the_wait(library, driver):
    driver.failing = "cuDevicePrimaryCtxRetain"
    with pytest.raises(RuntimeError, match="cuDevicePrimaryCtxRetain failed with CUDA error 201"):
        mosaic_compiler.start(b"module", 0).result(timeout=20)


@needs_new_jax
def test_kernel__call_waits_for_its_compilation_and_launches(library, driver, monkeypatch):
    from vitkernels.bridge import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "mosaic_module", lambda function, shapes: function)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 100 + device, raising=False)
    compiled, finish = [], threading.Event()
    library.work = lambda module: compiled.append(module) or finish.wait(20)
    started, other = (mosaic_gpu.Kernel(module, ()) for module in (b"started", b"other"))
    for _ in range(2):
        started.start(torch.device("cuda", 1))
    tensor = SimpleNamespace(get_device=lambda: 1, data_ptr=lambda: 4096)
    threading.Timer(0.2, lambda: library.launches or finish.set()).start()  # a call that does not wait never finishes
    started(tensor)
    assert compiled == [b"started"] and finish.is_set()
    other(tensor)
    assert compiled == [b"started", b"other"]
    assert [launch[:2] for launch in library.launches] == [(7, 101)] * 2
    assert [name for name, *_ in driver.calls[threading.get_ident()]].count("cuCtxSetCurrent") == 2  # of the caller


@needs_new_jax
def test_kernel__call_raises_what_the_compilation_raised(library, monkeypatch):
    from vitkernels.bridge import mosaic_gpu

    monkeypatch.setattr(mosaic_gpu, "mosaic_module", lambda function, shapes: function)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    library.work = lambda module: False
    kernel = mosaic_gpu.Kernel(b"bad", ())
    kernel.start(torch.device("cuda", 0))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Mosaic GPU failed to compile the kernel"):
            kernel(SimpleNamespace(get_device=lambda: 0, data_ptr=lambda: 0))
    assert not library.launches


COMPILING = """
import ctypes, os, sys, threading, multiprocessing
from vitkernels.bridge import mosaic_compiler

running, finish = threading.Event(), threading.Event()

class Library:
    def MosaicGpuCompile(self, module, size):
        running.set()
        finish.wait()
        ctypes.CDLL(None).usleep(500_000)  # without Python's lock, as a compilation
        os.write(1, b"compiled ")
        return None

mosaic_compiler.enter_primary_context = lambda device: None
mosaic_compiler.load_modules_during_captures = lambda: None
mosaic_compiler._library = Library
mosaic_compiler.start(b"module", 0)
assert running.wait(20)
"""


def run_compiling(code):
    ran = subprocess.run([sys.executable, "-c", COMPILING + code], capture_output=True, text=True, timeout=120)
    return ran.returncode, ran.stdout.split(), ran.stderr


@pytest.mark.parametrize("code, status", [("", 0), ("; sys.exit(75)", 75)])
def test_exit__waits_for_a_compilation(code, status):
    """Not to wait would run C++ destructors under it."""
    assert run_compiling(f"os.write(1, b'end '); finish.set(){code}") == (status, ["end", "compiled"], "")


def test_exit__after_an_error_keeps_it():
    status, written, errors = run_compiling("finish.set(); raise KeyError('of the run')")
    assert status == 1 and written == ["compiled"] and "KeyError: 'of the run'" in errors


@pytest.mark.parametrize(
    "fork",
    [
        "child = os.fork()\nif child == 0: sys.exit(3)\nstatus = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])",
        "child = multiprocessing.get_context('fork').Process(target=sys.exit, args=(3,))\n"
        "child.start(); child.join(); status = child.exitcode",
    ],
)
def test_fork__child_of_a_compiling_process_ends_at_once(fork):
    """It has none of the threads."""
    status, written, _ = run_compiling(f"{fork}\nos.write(1, b'child%d ' % status); finish.set()")
    assert (status, written) == (0, ["child3", "compiled"])
