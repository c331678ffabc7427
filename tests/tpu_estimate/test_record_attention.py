"""Any attention backend's estimate for a TPU: its torch graph, recorded, compiled by libtpu; no TPU is used."""

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")

from vitkernels import attention
from vitkernels.runtime import xla
from vitkernels.tpu_estimate import attention as tpu_attention
from vitkernels.tpu_estimate import compiler, dump, record_attention, report
from vitkernels.tpu_estimate import program as tpu_program

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


def recorded(which: str):
    """Called in the compiling process."""
    return record_attention.record("pallas_flash", which, *SHAPE, "v5e"), {}, True


@needs_both
@pytest.mark.parametrize("which", ["forward", "with projections"])
def test_recorded_from_torch_a_kernel_takes_what_its_jax_function_takes(which, tmp_path):
    """pallas_flash can be estimated by both ways: the arrays lie as suits it, and nothing stands around the kernels."""
    expected = tpu_attention.estimate("pallas_flash", which, SHAPE)
    program = tpu_program.estimate(dump.compile_in(tmp_path, f"{__name__}:recorded", which))
    assert program.estimate_ms == pytest.approx(expected.estimate_ms, rel=0.01)
    assert program.untimed == expected.untimed == []


@needs_both
def test_a_backend_that_is_registered_is_a_contender(script, tmp_path, capsys):
    words = ["--shapes", ",".join(map(str, SHAPE)), "--contenders", "native", "--passes", "forward+backward"]
    script.main([*words, "--json", str(tmp_path / "report.json")])
    (row,) = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert row["contender"] == "native" and 0 < row["estimate_ms"] < 1
    assert "| forward+backward | native |" in capsys.readouterr().out


def test_a_new_backend_is_one_as_soon_as_it_is_registered(script, monkeypatch):
    monkeypatch.setitem(attention._MODULES, "my_backend", "nowhere")
    asked = []

    def row(name, which, shape, chip):
        asked.append(name)
        return {"contender": name, "pass": which, "error": "it is not there"}

    monkeypatch.setattr(report, "row", row)
    monkeypatch.setattr(compiler, "unavailable", lambda: None)
    script.main(["--shapes", "1,1,8,8", "--contenders", "my_backend", "--passes", "forward"])
    assert asked == ["my_backend"]
    assert "auto" not in tpu_attention.contenders() and set(attention.names()) - {"auto"} < {
        *tpu_attention.contenders()
    }
