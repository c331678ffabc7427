"""Runtimes: what can be asked for, what is known of the chip, and the guard against recompilation."""

import logging
from pathlib import Path

import pytest
import torch

from vitkernels import runtime
from vitkernels.errors import UsageError
from vitkernels.runtime import cuda, xla
from vitkernels.runtime.peaks import peak_flops


def test_unknown_names_list_the_choices():
    with pytest.raises(UsageError, match=r"unknown runtime 'gpu'; known: auto, cpu, cuda, xla"):
        runtime.create("gpu")
    with pytest.raises(UsageError, match="unknown precision 'fp8'"):
        runtime.create("cpu", "fp8")
    with pytest.raises(UsageError, match="can be fp32, bf16 or auto"):
        runtime.create("cpu", "fp16")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu_says_what_to_do():
    with pytest.raises(UsageError, match=r"runtime=cuda cannot run here: .*runtime=cpu|has no CUDA"):
        runtime.create("cuda")
    assert cuda.unavailable()


def test_xla_without_torch_xla_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"vitkernels\[tpu\]"):
        runtime.create("xla")


@pytest.mark.skipif(torch.cuda.is_available() or xla.has_tpu(), reason="this machine has an accelerator")
def test_auto_says_why_it_took_the_cpu(caplog):
    with caplog.at_level(logging.INFO):
        assert runtime.create("auto").name == "cpu"
    assert "not cuda: " in caplog.text and "not xla: no TPU" in caplog.text


def test_precision_decides_autocast():
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        cpu = runtime.create("cpu", precision)
        with cpu.autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == dtype


def test_peaks_by_the_exact_name():
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
    compiled = iter([0, 1] * 3 + [1, 1, 1, 2, 2, 3])  # before and after each step
    monkeypatch.setattr(xla, "_compilations", lambda: next(compiled))
    guard = xla._RecompileGuard()
    for _ in range(3):
        with guard.watch("train", {"images": (8, 3, 32, 32)}):
            pass
    return guard


def test_guard_is_silent_while_warming_up_and_names_what_changed(guard, caplog):
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


def test_cpu_reads_scalars_and_feeds_batches():
    cpu = runtime.create("cpu")
    assert cpu.read([torch.tensor(1.5), torch.tensor(2.5)]) == [1.5, 2.5]
    assert cpu.read([]) == []
    assert list(cpu.feed([(1, 2), (3, 4)])) == [(1, 2), (3, 4)]
    assert cpu.peak_memory_bytes() > 1e6


@pytest.mark.parametrize("status", ["VmSize:\t   9000 kB\nVmRSS:\t    5000 kB\n", None])
def test_peak_memory_where_the_system_does_not_keep_it(status, monkeypatch):
    """As in gVisor, and where there is no /proc."""

    def read_text(path):
        if status is None:
            raise FileNotFoundError(path)
        return status

    monkeypatch.setattr(Path, "read_text", read_text)
    assert runtime.create("cpu").peak_memory_bytes() > 1e6


@pytest.mark.gpu
def test_cuda_feed_gives_every_batch_in_order_on_the_device():
    gpu = runtime.create("cuda")
    batches = [(torch.full((4, 4), float(i)).pin_memory(), torch.tensor([i])) for i in range(5)]
    got = [(images.sum().item() / 16, targets.item(), images.device.type) for images, targets in gpu.feed(batches)]
    assert got == [(i, i, "cuda") for i in range(5)]
    a = gpu.stamp()
    torch.randn(512, 512, device="cuda") @ torch.randn(512, 512, device="cuda")
    b = gpu.stamp()
    gpu.synchronize()
    assert gpu.elapsed_ms(a, b) > 0
