"""The doctor's verdicts, and what tune needs."""

import torch
from expecting import error

from vitkernels import attention, runtime
from vitkernels.cli import doctor, tune


def test_doctor__knows_every_runtime_and_backend(capsys):
    assert {*doctor.runtimes(), "auto"} == set(runtime.names())
    assert set(doctor.backends()) == set(attention.names())
    assert doctor.runtimes()["cpu"] is None and doctor.backends()["native"] is None
    doctor.main([])
    printed = capsys.readouterr().out
    for word in ("torch", "CPU:", "runs", *attention.names()):
        assert word in printed
    if doctor.runtimes()["cuda"] is not None and "TPU: attached" not in printed:
        assert "attn=triton_flash  runs interpreted, slowly, for tests\n" in printed


def test_tune__without_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with error("tune.no_gpu"):
        tune.tune("vit_base_patch16_224", 8, "bfloat16", tmp_path / "table.json")


def test_tune__model_without_an_mlp():
    with error("tune.model", name="resnet18"):
        tune.sizes_of("resnet18", 8)
