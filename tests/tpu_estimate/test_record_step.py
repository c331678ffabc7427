"""The report on a training step: train.py's graph, recorded, compiled by libtpu and estimated without a TPU."""

import json

import pytest
from expecting import error

pytest.importorskip("jax")

from vitkernels.cli.tpu_estimate import main as command
from vitkernels.runtime import xla
from vitkernels.tpu_estimate import chips, compiler, hlo, record_step, step_comparison, step_picture, step_report
from vitkernels.tpu_estimate.estimate import OperationEstimate, ProgramEstimate

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


@pytest.mark.slow
@needs_both
def test_command__step(tmp_path, capsys):
    settings = ["model=vit_digits", "data=digits", "attn=pallas_flash", "ops=eager", "data.batch_size=4"]
    settings.append("+model.kwargs.depth=1")
    paths = tmp_path / "a.json", tmp_path / "a.png"
    words = ["step", *settings, "--operations", "--json", str(paths[0]), "--picture", str(paths[1])]
    assert command(words) == 0
    printed = capsys.readouterr().out
    found = json.loads(paths[0].read_text())
    assert found["label"].startswith("ESTIMATE") and found["chip"] == "v5e" and found["settings"] == settings
    step, rows, operations = found["step"], found["kernels"], found["operations"]
    assert step["fits_in_hbm"] and 0 < step["estimate_ms"] < 5
    assert step["estimate_ms"] == pytest.approx(sum(row["estimate_ms_in_all"] for row in rows))
    assert step["estimate_ms"] == pytest.approx(sum(step["estimate_ms_of_parts"].values()))
    attention = [row for row in rows if row["part"] == "Pallas kernels"]
    assert sum(row["times_run"] for row in attention) == 2  # forward and backward of one block
    assert all(row["estimate_ms"] > 0 and row["mxu_share"] > 0 for row in attention)
    assert sum(row["times_run"] for row in rows) == len(operations)
    last = operations[-1]
    assert last["start_ms"] + last["estimate_ms"] == pytest.approx(step["estimate_ms"])
    assert all(f"| {row['name']} |" in printed for row in operations)  # every operation by name
    assert paths[1].stat().st_size > 10_000


def document(chip="v5e", settings=("attn=sdpa",), **kernels) -> dict:
    """A step's document with kernels of (part, ms in total, times run)."""
    rows = [
        {"part": part, "op": name, "result": "f32[8]{0}", "estimate_ms_in_all": ms, "times_run": runs}
        for name, (part, ms, runs) in kernels.items()
    ]
    total = sum(row["estimate_ms_in_all"] for row in rows)
    return {"chip": chip, "settings": list(settings), "step": {"estimate_ms": total}, "kernels": rows}


def test_compare__says_where_the_difference_comes_from(tmp_path, capsys):
    first = document(mm=("matrix products", 60.0, 12), softmax=("attention in XLA", 40.0, 12))
    second = document(
        settings=["attn=pallas_flash"], mm=("matrix products", 61.0, 12), flash=("Pallas kernels", 9.0, 12)
    )
    for name, found in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(found))
    assert command(["--compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "B takes 0.700 × the time of A: -30.00 ms" in printed and "attn=pallas_flash" in printed
    assert "| attention in XLA | 40.00 | 0.00 | -40.00 | 12, 0 |" in printed
    assert "| attention in XLA, softmax, f32[8] | 40.00 | 0.00 | -40.00 | 12, 0 |" in printed
    assert printed.index("-40.00") < printed.index("+9.00") < printed.index("+1.00")  # the largest first


def test_compare__refuses_other_files(tmp_path, capsys):
    (tmp_path / "a.json").write_text("{}")
    with error("tpu_estimate.report"):
        step_comparison.read(tmp_path / "a.json")
    assert command(["--compare", str(tmp_path / "a.json"), str(tmp_path / "no.json")]) == 2
    assert "tpu-estimate step" in capsys.readouterr().err


def test_command__step_refuses_settings_before_compiling(capsys):
    for words in (["step", "attn=pallas_flush"], ["step", "--chip", "v5e,v6e"], ["step", "--chip", "v9"], []):
        assert command(words) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_binned__averages_over_time():
    rows = [
        {"start_ms": 0.0, "estimate_ms": 1.0, "mxu_share": 1.0},
        {"start_ms": 1.0, "estimate_ms": 2.0, "mxu_share": None},
        {"start_ms": 3.0, "estimate_ms": 1.0, "mxu_share": 0.5},
    ]
    assert step_picture.binned(rows, "mxu_share", 4.0, bins=2) == [0.5, 0.25]
    assert step_picture.binned(rows, "mxu_share", 4.0, bins=8) == [1.0, 1.0, 0, 0, 0, 0, 0.5, 0.5]


@pytest.mark.parametrize(
    "words", [["step", "--compare", "attn=sdpa", "attn=native"], ["--compare", "a.json", "b.json"]]
)
@pytest.mark.parametrize("output", ["--picture", "--json"])
def test_compare__refuses_files_about_one_step_and_says_how_to_get_them(words, output, capsys):
    assert command([*words, output, "file"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {output} with --compare") and "tpu-estimate --compare a.json b.json" in line
