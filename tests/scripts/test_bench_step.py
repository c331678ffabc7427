"""scripts/bench_step.py, but for the measuring, which is vitkernels.benchmarks.step's."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import bench_step

    yield bench_step
    del sys.modules["bench_step"]


def test_without_a_gpu_it_refuses_its_large_model_and_not_another(script, monkeypatch, tmp_path, capsys):
    built = []
    monkeypatch.setattr(script.step, "run_variants", lambda build, *_, **settings: built.append(settings) or ())
    common = ["bench_step.py", "--runtime", "cpu", "--ours", "eager", "--results", str(tmp_path / "rows.jsonl")]
    monkeypatch.setattr("sys.argv", common)
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "vit_b16_256 at batch 128 needs a GPU, and here is cpu" in capsys.readouterr().err and not built
    monkeypatch.setattr("sys.argv", [*common, "--model", "vit_digits"])
    script.main()
    assert len(built) == 1


def test_the_row_of_train_py_has_no_warm_up_time_that_nobody_measured(script, monkeypatch):
    def trained(command, **_):
        folder = next(word.partition("=")[2] for word in command if word.startswith("hydra.run.dir="))
        times = {"median": 1.0, "p10": 1.0, "p90": 1.0, "mean": 1.0, "n": 4}
        summary = {"step_time_ms": times, "peak_memory_bytes": 5, "train_loss": 2.0}
        Path(folder, "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr(subprocess, "run", trained)
    args = argparse.Namespace(model="m", batch=1, classes=2, warmup=1, steps=4, runtime="cpu")
    row = script.train_py(args, ("attn=sdpa",))
    assert (row.variant, row.median, row.n, row.warmup_seconds) == ("train.py attn=sdpa", 1.0, 4, None)
