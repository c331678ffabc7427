"""Fixtures of the entire suite. Warnings are errors, except those listed in pyproject.toml with their reasons."""

import gc
import importlib.util
import logging
import os
import platform
import sys
from collections import Counter

# Set before torch_xla is imported by any test: on a machine without a TPU it trains on the CPU.
os.environ.setdefault("PJRT_DEVICE", "CPU")
# Set before torch loads: threads that sleep instead of spinning let tests share the machine with other work.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from pathlib import Path

import pytest
import torch

# torch.compile takes the vector instructions from /proc/cpuinfo; else each process would start two others to try them.
if not torch.cuda.is_available():
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

ROOT = Path(__file__).resolve().parents[1]

# Python would look for garbage thousands of times among the objects of torch, JAX and the collected tests.
gc.set_threshold(20_000, 10, 10)


def pytest_configure(config):
    # torch.distributed.checkpoint warns about this for a single process, which needs no process group.
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled, unavailable or uninitialized")
    logging.getLogger("c10d-NullHandler-dcp_logger").propagate = False  # 25 lines of each, in every failure's report


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # they stay to the end


def pytest_collection_modifyitems(items):
    if "PYTEST_XDIST_WORKER" in os.environ:
        # Long files first, so that no worker is left with one when the others are done. Slow tests decide: many of the
        # longest files have only a few tests.
        length = Counter()
        for item in items:
            length[item.path] += 50 if item.get_closest_marker("slow") else 1
        items.sort(key=lambda item: -length[item.path])
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture(autouse=True)
def _quick_interpreter():
    """Switch off the search for integer overflows in Triton's interpreter.

    It takes a quarter of the interpreter's time, and the interpreter reports them only on request.
    """
    if not torch.cuda.is_available() and "triton" in sys.modules:
        from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

        interpreter_builder.options = InterpreterOptions(sanitize_overflow=False)


@pytest.fixture
def settings(tmp_path):
    """compose(*overrides) -> the configuration that `python train.py <overrides>` would run with."""
    from hydra import compose, initialize_config_dir

    def composed(*overrides: str):
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            return compose("config", overrides=list(overrides))

    return composed


@pytest.fixture
def losses():
    """losses(run_dir) -> the loss of each step in its metrics.jsonl, by step."""
    import json

    def read(run_dir: Path) -> dict[int, float]:
        lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        return {line["step"]: line["loss"] for line in lines if "loss" in line}

    return read


@pytest.fixture
def quick_kernels(monkeypatch):
    """Interpreted Pallas kernels compile without XLA's optimizations for the CPU, which take most of a test's time.

    With a GPU, tests compile as users do.
    """
    if torch.cuda.is_available() or importlib.util.find_spec("jax") is None:
        return
    import jax
    from quick_xla import options_of_jax

    from vitkernels.bridge import pallas_devices

    options = options_of_jax()
    if platform.machine() == "x86_64":
        options["xla_cpu_max_isa"] = "AVX512"  # as jit_on_cpu, which says why
    monkeypatch.setattr(pallas_devices, "jit_on_cpu", lambda function: jax.jit(function, compiler_options=options))
