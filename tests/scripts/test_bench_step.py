"""scripts/bench_step.py and its variants, except for the measurements."""

import json
import sys
from pathlib import Path

import pytest
from expecting import error

from vitkernels import runtime as runtimes
from vitkernels.benchmarks.step_variants import StepBenchmark
from vitkernels.runtime import create


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import bench_step

    yield bench_step
    del sys.modules["bench_step"]


def test_main__default_model_needs_a_gpu(script, monkeypatch, tmp_path):
    measured = []
    monkeypatch.setattr(script.step, "run_variants", lambda variants, *_, **sizes: measured.append(sizes) or ())
    common = ["bench_step.py", "--runtime", "cpu", "--ours", "eager", "--results", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", common)
    with error("benchmarks.needs_gpu"):
        script.main()
    assert not measured
    monkeypatch.setattr("sys.argv", [*common, "--model", "vit_digits"])
    script.main()
    assert len(measured) == 1


def test_available__fused_variants_need_their_kernels():
    benchmark, runtime = StepBenchmark("vit_digits", "sdpa", 1, 10, 1, 4), create("cpu")
    assert benchmark.available(runtime, None) == [
        "accelerate",
        "eager",
        "train.py cold",
        "train.py",
        "train.py speed=max",
    ]
    with error("benchmarks.no_kernels", variants=["best", "fused"]):
        benchmark.available(runtime, ["eager", "fused", "best"])


def test_variants__baseline_first_and_last():
    benchmark, runtime = StepBenchmark("vit_digits", "sdpa", 1, 10, 1, 4), create("cpu")
    variants = benchmark.variants(runtime, ["eager native"], ["accelerate", "eager", "train.py"])
    names = [
        "timm compiled sdpa",
        "timm eager native",
        "timm accelerate",
        "attn=sdpa eager",
        "timm compiled sdpa again",
    ]
    assert [variant.name for variant in variants] == names
    assert [variant.compare_losses for variant in variants] == [True, False, False, False, True]


@pytest.mark.slow
def test_main__times_timm_accelerate_and_train_py_in_one_run(script, monkeypatch, tmp_path, capsys):
    words = "--model vit_digits --batch 4 --classes 10 --warmup 2 --steps 3 --learning-steps 0 --runtime cpu --peers"
    monkeypatch.setattr(runtimes.base.Runtime, "compile", lambda self, model, mode=None: model)  # costs a minute
    rows = tmp_path / "rows.jsonl"
    ours = ["--ours", "accelerate", "train.py cold", "train.py speed=max"]
    monkeypatch.setattr("sys.argv", ["bench_step.py", *words.split(), *ours, "--results", str(rows)])
    script.main()
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    names = ["timm compiled sdpa", "timm accelerate", "timm compiled sdpa again", "train.py cold", "train.py speed=max"]
    assert [row["variant"] for row in found] == names
    assert all(row["median"] > 0 and row["first_step_s"] > 0 and row["n"] == 3 for row in found)
    assert capsys.readouterr().out.count("\n| t") == len(found)
