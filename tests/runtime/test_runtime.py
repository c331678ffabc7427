"""Runtimes: names and precisions, peak FLOP/s by chip, and the warning about recompilation."""

import logging
from pathlib import Path

import pytest
import torch
from expecting import error

from vitkernels import runtime
from vitkernels.errors import UsageError
from vitkernels.runtime import cuda, xla
from vitkernels.runtime.peaks import peak_flops


def test_create__rejects_unknown_names_and_precisions():
    with error("unknown_name", name="gpu", choices=["auto", "cpu", "cuda", "xla"]):
        runtime.create("gpu")
    with error("unknown_name", name="fp8", choices=["auto", "bf16", "fp16", "fp32"]):
        runtime.create("cpu", "fp8")
    with error("runtime.precision", runtime="cpu", precision="fp16"):
        runtime.create("cpu", "fp16")


def test_create__precision_message():
    """A snapshot of the wording."""
    with pytest.raises(UsageError) as caught:
        runtime.create("cpu", "fp16")
    assert str(caught.value) == "runtime 'cpu' does not support precision 'fp16'; it supports fp32, bf16 and auto"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda__unavailable_without_a_gpu():
    assert cuda.unavailable()
    with error("runtime.unavailable", runtime="cuda", reason=cuda.unavailable()):
        runtime.create("cuda")


def test_xla__unavailable_without_torch_xla_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with error("runtime.unavailable", runtime="xla") as caught:
        runtime.create("xla")
    assert "vitkernels[tpu]" in str(caught.value)


@pytest.mark.skipif(torch.cuda.is_available() or xla.has_tpu(), reason="this machine has an accelerator")
def test_auto__logs_why_it_chose_the_cpu(caplog):
    with caplog.at_level(logging.INFO):
        assert runtime.create("auto").name == "cpu"
    assert "not cuda: " in caplog.text and "not xla: no TPU" in caplog.text


def test_precision__sets_the_dtype_of_autocast():
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        cpu = runtime.create("cpu", precision)
        with cpu.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_peak_flops__requires_the_exact_name():
    assert peak_flops("NVIDIA H200", torch.bfloat16) == 989.5e12
    assert peak_flops("NVIDIA H100 NVL", torch.bfloat16) == 835.5e12
    assert peak_flops("NVIDIA L40S", torch.bfloat16) == 362e12
    assert peak_flops("NVIDIA L4", torch.bfloat16) == 121e12
    for unknown in ("NVIDIA L40", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 NVL"):
        assert peak_flops(unknown, torch.bfloat16) is None
    assert peak_flops("TPU v5e", torch.bfloat16) == 197e12
    assert peak_flops("CPU, 2 threads", torch.float32) is None


@pytest.fixture
def guard(monkeypatch):
    compiled = iter([0, 1] * 3 + [1, 1, 1, 2, 2, 3])  # counter before and after each step
    monkeypatch.setattr(xla, "_compilations", lambda: next(compiled))
    guard = xla._RecompileGuard()
    for _ in range(3):
        with guard.watch("train", {"images": (8, 3, 32, 32)}):
            pass
    return guard


def test_recompile_guard__silent_in_warm_up_then_names_the_changed_shape(guard, caplog):
    assert caplog.text == ""
    with guard.watch("train", {"images": (8, 3, 32, 32)}):
        pass
    assert caplog.text == ""
    with guard.watch("train", {"images": (5, 3, 32, 32)}):
        pass
    assert "images (8, 3, 32, 32) -> (5, 3, 32, 32)" in caplog.text
    with guard.watch("train", {"images": (5, 3, 32, 32)}):
        pass
    assert "no input shape changed" in caplog.text


def test_cpu__reads_scalars_and_feeds_batches():
    cpu = runtime.create("cpu")
    assert cpu.read([torch.tensor(1.5), torch.tensor(2.5)]) == [1.5, 2.5]
    assert cpu.read([]) == []
    assert list(cpu.feed([(1, 2), (3, 4)])) == [(1, 2), (3, 4)]
    assert cpu.peak_memory_bytes() > 1e6


@pytest.mark.parametrize("status", ["VmSize:\t   9000 kB\nVmRSS:\t    5000 kB\n", None])
def test_peak_memory__falls_back_without_proc_status(status, monkeypatch):
    """gVisor's /proc has no VmHWM; other systems have no /proc."""

    def read_text(path):
        if status is None:
            raise FileNotFoundError(path)
        return status

    monkeypatch.setattr(Path, "read_text", read_text)
    assert runtime.create("cpu").peak_memory_bytes() > 1e6


@pytest.mark.gpu
def test_cuda__feeds_again_into_the_same_memory():
    gpu, batch = runtime.create("cuda"), (torch.zeros(2**23).pin_memory(),)
    reserved = []
    for _ in range(4):
        assert len(list(gpu.feed([batch]))) == 1
        gpu.synchronize()
        reserved.append(torch.cuda.memory_reserved())
    assert reserved[1:] == reserved[:-1]


@pytest.mark.gpu
def test_cuda__feeds_every_batch_in_order():
    gpu = runtime.create("cuda")
    batches = [(torch.full((4, 4), float(i)).pin_memory(), torch.tensor([i])) for i in range(5)]
    got = [(images.sum().item() / 16, targets.item(), images.device.type) for images, targets in gpu.feed(batches)]
    assert got == [(i, i, "cuda") for i in range(5)]
    a = gpu.stamp()
    torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    b = gpu.stamp()
    gpu.synchronize()
    assert gpu.elapsed_ms(a, b) > 0
