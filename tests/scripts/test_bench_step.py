"""scripts/bench_step.py and its variants, except for the measurements."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from expecting import error

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
    assert benchmark.available(runtime, None) == ["eager", "train.py"]
    with error("benchmarks.no_kernels", variants=["best", "fused"]):
        benchmark.available(runtime, ["eager", "fused", "best"])


def test_variants__baseline_first_and_last():
    benchmark, runtime = StepBenchmark("vit_digits", "sdpa", 1, 10, 1, 4), create("cpu")
    variants = benchmark.variants(runtime, ["eager native"], ["eager", "train.py"])
    names = ["timm compiled sdpa", "timm eager native", "attn=sdpa eager", "timm compiled sdpa again"]
    assert [variant.name for variant in variants] == names
    assert [variant.compare_losses for variant in variants] == [True, False, False, True]


def test_time_train_py__has_no_warm_up_time(monkeypatch):
    def trained(command, **_):
        folder = next(word.partition("=")[2] for word in command if word.startswith("hydra.run.dir="))
        times = {"median": 1.0, "p10": 1.0, "p90": 1.0, "mean": 1.0, "n": 4}
        summary = {"step_time_ms": times, "peak_memory_bytes": 5, "train_loss": 2.0}
        Path(folder, "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(subprocess, "run", trained)
    row = StepBenchmark("m", "sdpa", 1, 2, 1, 4, "cpu").time_train_py(Path(), ("attn=sdpa",))
    assert (row.variant, row.median, row.n, row.warmup_seconds) == ("train.py attn=sdpa", 1.0, 4, None)
