"""Estimates of programs: small ones written by hand, and real ones compiled by libtpu without a TPU."""

import json
import sys
import time
from pathlib import Path

import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.tpu_estimate import chips, compile_process, compiler, dump, published_cases, report, validate
from vitkernels.tpu_estimate.estimate import array_bytes, estimate_program

needs_libtpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))

MODULE = """HloModule test, is_scheduled=true

ENTRY %main (x: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[1024,1024]{1,0:T(8,128)} parameter(0)
  %copy-start = (f32[1024,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%x)
  %fusion.1 = f32[1024,1024]{1,0:T(8,128)} fusion(%x), kind=kLoop, metadata={op_name="jit(f)/add"}
  %fusion.2 = f32[8]{0} fusion(%x), kind=kLoop, backend_config={"window_config":{"estimated_cycles":"1500000"}}
  %copy-done = f32[1024,1024]{1,0:T(8,128)S(1)} copy-done(%copy-start)
  ROOT %bitcast = f32[1024,1024]{1,0:T(8,128)} bitcast(%copy-done)
}
"""


def write_dump(folder: Path, bundles: int) -> dump.CompilationDump:
    """Write a dump of MODULE whose fusion.1 has this many bundles."""
    (folder / "compiled_module.hlo").write_text(MODULE)
    (folder / "compiled_memory.json").write_text(json.dumps({"argument": 4}))
    text = f"   0   :  {{}}\n  {hex(bundles - 1)}   :  {{}}\n"
    (folder / "1-fusion.1-07-packed-bundles-post-ra.txt").write_text(text)
    (folder / "1-fusion.1-06-schedule-analysis_packed-bundles-post-ra.txt").write_text("not this one")
    (folder / "1-fusion.1-05-post-ra.txt").write_text("#allocation0 [shape = 'u8[16]{0}', space=vmem, size = 0x10, x]")
    return dump.CompilationDump(folder)


def test_estimate_program__early_copy_overlaps_with_operations(tmp_path):
    program = estimate_program(write_dump(tmp_path, bundles=1500))
    names = [operation.name for operation in program.operations]
    assert names == ["fusion.1", "fusion.2", "copy-done"]
    first, second, wait = program.operations
    assert (first.estimate_ms, first.vmem, first.source) == (pytest.approx(1e-3), 16, "jit(f)/add")
    assert second.estimate_ms == pytest.approx(1.0)  # no schedule, so XLA's own estimate counts
    assert program.untimed == ["fusion.2"]
    assert program.prefetched == 4 * 2**20
    assert wait.estimate_ms == pytest.approx(4 * 2**20 / 819e9 * 1e3 - 1e-3)
    assert program.estimate_ms == pytest.approx(1.0 + 4 * 2**20 / 819e9 * 1e3)


def test_estimate_program__fully_hidden_copy_is_free(tmp_path):
    program = estimate_program(write_dump(tmp_path, bundles=15000))
    assert program.operations[-1].estimate_ms == 0


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("f32[3,577]{1,0:T(8,128)}", 8 * 640 * 4),
        ("bf16[2,577,64]{1,2,0:T(8,128)(2,1)S(1)}", 2 * 640 * 64 * 2),
        ("pred[16]{0}", 16),
        ("u32[]{:S(2)}", 4),
        ("f8e4m3fn[10]{0:T(1024)}", 10),
    ],
)
def test_array_bytes__includes_padding(text, size):
    assert array_bytes(text) == size


def refused():
    raise ValueError("no such kernel")


def endless():
    time.sleep(60)


@needs_libtpu
@pytest.mark.parametrize("index", [0, 8, 13], ids=["XLA's matmul", "Pallas matmul", "JAX's flash attention"])
def test_reestimate__matches_recorded_estimates(index):
    case = validate.PUBLISHED[index]
    assert validate.reestimate(case) == pytest.approx(case.recorded_ms, rel=0.01)
    assert case.ratio == pytest.approx(1, abs=0.08)


def test_published__fitted_timings_agree_within_8_percent():
    """Each row has its source, and none is left out of the claim."""
    ratios = {case.what: round(case.ratio, 2) for case in validate.PUBLISHED if case.fitted}
    assert {what: ratio for what, ratio in ratios.items() if not 0.92 <= ratio <= 1.08} == {} and len(ratios) == 17
    assert all(case.source.startswith("https://") for case in validate.PUBLISHED)


def test_published__other_timings_are_as_far_off_as_the_documents_say():
    others = [case for case in validate.PUBLISHED if not case.fitted]
    assert [round(case.ratio, 2) for case in others if case.chip == "v5e"] == [1.01, 0.79, 0.72, 0.82, 0.88, 0.69, 0.91]
    assert [round(case.ratio, 2) for case in others if case.chip == "v6e"] == [0.91, 0.92, 0.82, 0.9]
    assert "0.69 to 1.01 for 7 others of v5e" in report.trust(chips.chip("v5e"))
    assert "NOT VALIDATED" in report.trust(chips.chip("v5p"))


def test_sparse_scalars__skip_blocks_above_the_diagonal():
    computed, kind, rows, columns = (x.reshape(3, 3) for x in published_cases.sparse_scalars(1536))
    assert computed.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert rows.tolist() == [[0, 1, 1], [1, 1, 2], [2, 2, 2]]  # the next block to compute, in rows
    assert columns.tolist() == [[0, 0, 0], [0, 1, 0], [0, 1, 2]]
    assert kind.tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]  # 1: the block has the diagonal


@needs_libtpu
def test_compile_in__reports_refusal_and_timeout(tmp_path):
    with error("tpu_estimate.compile", chip="v5e") as caught:
        compile_process.compile_in(tmp_path, f"{__name__}:refused")
    assert "no such kernel" in str(caught.value)  # the end of the compiler's output
    with error("tpu_estimate.timeout", timeout=0.2):
        compile_process.compile_in(tmp_path, f"{__name__}:endless", timeout=0.2)


@needs_libtpu
def test_compile_in__restarts_killed_server(tmp_path):
    compile_process._server().kill()
    compile_process._server().wait()
    with error("tpu_estimate.compile"):
        compile_process.compile_in(tmp_path, f"{__name__}:refused")


@needs_libtpu
def test_tpu_report__compares_attention(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "scripts"))
    import tpu_report as script

    monkeypatch.delitem(sys.modules, "tpu_report")
    arguments = ["--shapes", "2,4,256,64", "--contenders", "pallas_flash", "xla", "--passes", "forward", "--operations"]
    script.main([*arguments, "--json", str(tmp_path / "report.json")])
    printed = capsys.readouterr().out
    assert "ESTIMATE" in printed and "published ms" in printed and "pallas_flash" in printed
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["label"] == "ESTIMATE" and len(written["validation"]) > 10
    ours, xla = written["rows"]
    (kernel,) = ours["operations"]
    assert ours["untimed"] == xla["untimed"] == []
    assert kernel["kind"] == "tpu_custom_call" and kernel["not_interpreted"] == []
    # A packed qkv is read once, and a third of its size is written once.
    assert (kernel["read_bytes"], kernel["written_bytes"]) == (2 * 256 * 768 * 2, 2 * 256 * 256 * 2)
    assert ours["hbm_size_bytes"] == kernel["read_bytes"] + kernel["written_bytes"]
    assert max(kernel["estimate_compute_ms"], kernel["estimate_memory_ms"]) <= kernel["estimate_ms"] < 0.02
    assert 0.1 < kernel["busy"]["MXU"] < 1
    assert xla["estimate_ms"] > 0


def test_table__failed_row():
    rows = [{"pass": "forward", "contender": "pallas_flash", "error": "x does not compile for v5e:\nout of VMEM"}]
    assert report.table(rows).splitlines()[-1] == "| forward | pallas_flash | out of VMEM |"


def test_speedup_over_best__names_best_other_contender():
    times = {"forward": (1.0, 3.0, 2.0), "backward": (2.0, 5.0, None)}
    rows = [
        {"pass": which, "contender": name} | ({"error": "no"} if ms is None else {"estimate_ms": ms})
        for which, found in times.items()
        for name, ms in zip(("ours", "a", "b"), found, strict=True)
    ]
    text = report.speedup_over_best(rows)
    assert text.endswith("ours over the best other contender: forward 2.00 × (b), backward 2.50 × (a)")
    assert report.speedup_over_best(rows[:1]).endswith("none")
