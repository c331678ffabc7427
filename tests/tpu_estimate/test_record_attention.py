"""Estimates of attention backends for a TPU from their recorded torch graph, compiled by libtpu without a TPU."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from vitkernels import attention
from vitkernels.runtime import xla
from vitkernels.tpu_estimate import attention_contenders, compile_process, compiler, record_attention, report
from vitkernels.tpu_estimate.estimate import estimate_program

pytestmark = pytest.mark.slow

needs_both = pytest.mark.skipif(
    compiler.unavailable() is not None or xla.unavailable() is not None,
    reason=f"{compiler.unavailable()} {xla.unavailable()}",
)
SHAPE = (2, 3, 197, 64)


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import tpu_report as script

    yield script
    monkeypatch.delitem(sys.modules, "tpu_report")


def recorded(pass_name: str):
    """Record pallas_flash; called in the compiling process."""
    return record_attention.record("pallas_flash", pass_name, *SHAPE, "v5e"), {}, True


@needs_both
@pytest.mark.parametrize("pass_name", ["forward", "with projections"])
def test_record__same_estimate_as_the_jax_function(pass_name, tmp_path):
    """pallas_flash can be estimated both ways: layouts are free, and there are no operations around the kernels."""
    expected = attention_contenders.estimate("pallas_flash", pass_name, SHAPE)
    program = estimate_program(compile_process.compile_in(tmp_path, f"{__name__}:recorded", pass_name))
    assert program.estimate_ms == pytest.approx(expected.estimate_ms, rel=0.01)
    assert program.untimed == expected.untimed == []


@needs_both
def test_tpu_report__registered_backend_is_a_contender(script, tmp_path, capsys):
    words = ["--shapes", ",".join(map(str, SHAPE)), "--contenders", "native", "--passes", "forward+backward"]
    script.main([*words, "--json", str(tmp_path / "report.json")])
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["contender"] == "native" and 0 < row["estimate_ms"] < 1
    assert "| forward+backward | native |" in capsys.readouterr().out


def test_contenders__include_new_backend(script, monkeypatch):
    attention.register("my_backend", "nowhere:BACKEND")
    asked = []

    def row(name, pass_name, shape, chip):
        asked.append(name)
        return {"contender": name, "pass": pass_name, "error": "not available"}

    monkeypatch.setattr(report, "row", row)
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    try:
        script.main(["--shapes", "1,1,8,8", "--contenders", "my_backend", "--passes", "forward"])
    finally:
        attention.unregister("my_backend")
    assert asked == ["my_backend"]
    assert "auto" not in attention_contenders.contenders() and set(attention.names()) - {"auto"} < {
        *attention_contenders.contenders()
    }
