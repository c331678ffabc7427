"""The report on a training step: train.py's graph, recorded, compiled by libtpu and estimated without a TPU."""

import json
import sys
from pathlib import Path

import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.runtime import xla
from vitkernels.tpu_estimate import chips, compiler, hlo, record_step, step_report
from vitkernels.tpu_estimate.estimate import OperationEstimate, ProgramEstimate

ROOT = Path(__file__).resolve().parents[2]
needs_both = pytest.mark.skipif(
    compiler.unavailable() is not None or xla.unavailable() is not None,
    reason=f"{compiler.unavailable()} {xla.unavailable()}",
)

MODULE = """HloModule test, is_scheduled=true

%fused.1 (a.1: f32[8]) -> f32[8] {
  %a.1 = f32[8]{0} parameter(0)
  ROOT %b.1 = f32[8]{0} add(%a.1, %a.1), metadata={op_name="one"}
}

%fused.2 (c.7: f32[8]) -> f32[8] {
  %c.7 = f32[8]{0} parameter(0)
  ROOT %d.9 = f32[8]{0} add(%c.7, %c.7), metadata={op_name="two"}
}

%fused.3 (c.7: f32[8]) -> f32[8] {
  %c.7 = f32[8]{0} parameter(0)
  ROOT %d.9 = f32[8]{0} multiply(%c.7, %c.7)
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %first = f32[8]{0} fusion(%x), kind=kLoop, calls=%fused.1, metadata={op_name="one"}, backend_config={"a":{"b":1}}
  %second = f32[8]{0} fusion(%first), kind=kLoop, calls=%fused.2, metadata={op_name="two"}
  %third = f32[8]{0} fusion(%second), kind=kLoop, calls=%fused.3
  %near = f32[8]{0:S(1)} fusion(%third), kind=kLoop, calls=%fused.2
  %c1 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"body":"AA"}
  ROOT %c2 = f32[8]{0} custom-call(%x), custom_call_target="tpu_custom_call", backend_config={"body":"BB"}
}
"""


def test_operations_that_run__identity_ignores_names():
    operations = {op.name: op for op in hlo.operations_that_run(MODULE)}
    assert list(operations) == ["first", "second", "third", "near", "c1", "c2"]
    assert operations["first"].identity == operations["second"].identity
    assert operations["first"].identity != operations["third"].identity  # multiplies
    assert operations["first"].identity != operations["near"].identity  # writes to VMEM
    assert operations["c1"].identity != operations["c2"].identity  # other programs
    assert operations["c1"].kind == "tpu_custom_call"


@pytest.mark.parametrize(
    ("operation", "part"),
    [
        (OperationEstimate("a", "tpu_custom_call", "pallas_call", 1), "Pallas kernels"),
        (OperationEstimate("name.3", "tpu_custom_call", "", 1), "XLA's own attention kernel"),
        (OperationEstimate("a", "copy", "aten__mm", 1), "copies"),
        (OperationEstimate("a", "fusion", "aten__addcmul", 1, file="/site/torch/optim/adam.py"), "optimizer"),
        (OperationEstimate("a", "fusion", "aten___softmax_backward_data", 1), "attention in XLA"),
        (OperationEstimate("a", "fusion", "aten__mm", 1, file="/x/vitkernels/attention/sdpa.py"), "attention in XLA"),
        (OperationEstimate("a", "fusion", "aten__native_batch_norm_backward.3", 1), "LayerNorm"),
        (OperationEstimate("a", "fusion", "aten__gelu", 1), "elementwise, sums"),
    ],
)  # fmt: skip
def test_part__classifies_operations(operation, part):
    assert step_report.part(operation) == part


@pytest.mark.parametrize(("temp", "fits"), [(16 * 2**30 - 40, True), (16 * 2**30 - 39, False)])
def test_step__aliased_memory_counts_once(temp, fits):
    memory = {"argument": 30, "output": 20, "alias": 20, "temp": temp, "generated_code": 10}
    program = ProgramEstimate([OperationEstimate("a", "fusion", "", 2.0)], memory=memory)
    row = step_report.step(program, batch=4, flops=197e9)
    assert (row["hbm_size_bytes"], row["fits_in_hbm"]) == (temp + 40, fits)
    assert row["estimate_images_per_s"] == 2000
    assert row["estimate_mfu"] == pytest.approx(0.5)


def test_compose__rejects_unknown_names_and_values():
    with error("unknown_name", name="v9"):
        chips.chip("v9")
    with error("unknown_name", name="pallas_flush"):
        record_step.compose(("attn=pallas_flush",))
    with error("config.range", setting="data.batch_size"):
        record_step.compose(("data.batch_size=0",))


def test_compose__settings_of_fake_data_only_for_fake_data():
    assert "pool_batches" not in record_step.compose(("model=vit_digits", "data=digits")).data.arguments
    for words in ((), ("data=fake",)):
        assert record_step.compose(words).data.arguments["pool_batches"] == 1
    assert record_step.compose(("data.pool_batches=2",)).data.arguments["pool_batches"] == 2


@needs_both
def test_tpu_report__training_step(tmp_path, capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import tpu_report as script

    monkeypatch.delitem(sys.modules, "tpu_report")
    settings = ["model=vit_digits", "data=digits", "attn=pallas_flash", "data.batch_size=4", "+model.kwargs.depth=1"]
    settings += ["chip=v5e"]
    script.main([*settings, "--output", str(tmp_path)])
    assert "ESTIMATE" in capsys.readouterr().out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["label"] == "ESTIMATE" and report["chip"] == "v5e" and len(report["validation"]) > 10
    step, rows = report["steps"]["pallas_flash"], report["kernels"]["pallas_flash"]
    assert step["fits_in_hbm"] and 0 < step["estimate_ms"] < 5
    assert step["estimate_ms"] == pytest.approx(sum(row["estimate_ms_in_all"] for row in rows))
    assert step["estimate_ms"] == pytest.approx(sum(step["estimate_ms_of_parts"].values()))
    attention = [row for row in rows if row["part"] == "Pallas kernels"]
    assert sum(row["times_run"] for row in attention) == 2  # forward and backward of one block
    assert all(row["estimate_ms"] > 0 and row["mxu_share"] > 0 for row in attention)
    assert (tmp_path / "report.png").stat().st_size > 10_000
