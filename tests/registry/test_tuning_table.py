"""The order of `auto` on a GPU: the user's measurements, then the shipped ones, then the default; and tune."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch

from vitkernels.benchmarks import ops as bench
from vitkernels.cli import tune
from vitkernels.ops import linear_gelu
from vitkernels.registry import tuning_table
from vitkernels.registry.op import Op


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Return the paths of a user's and a shipped table, both empty, as if on a machine with an H200."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tuning_table, "SHIPPED", tmp_path / "shipped.json")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    tuning_table._fastest_first.cache_clear()
    yield tuning_table.user_table(), tmp_path / "shipped.json"
    tuning_table._fastest_first.cache_clear()


def row(features=(768, 3072), dtype="bfloat16", **ms):
    return {"op": "linear_gelu", "dtype": dtype, "features": list(features), "rows": 32768, "ms": ms}


def order(features=(768, 3072), dtype=torch.bfloat16):
    return tuning_table.fastest_first("linear_gelu", features, dtype, 0, ("passes", "triton"))


def linear_gelu_op(modules):
    features = lambda x, w, b, tanh: ((5, 3), x.dtype)  # noqa: E731
    return Op("linear_gelu", modules, {"cuda": ("passes",)}, features=features, group="vitkernels.ops")


def test_order__user_table_precedes_shipped_table_message(tables, caplog):
    user, shipped = tables
    tuning_table.write(shipped, "NVIDIA H200", [row(hopper=1.0, passes=2.0)])
    tuning_table.write(user, "NVIDIA H200", [row(triton=0.5, hopper=0.75)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("triton", "hopper")
    assert caplog.messages == [
        "linear_gelu 768 x 3072 bfloat16 on NVIDIA H200: triton 0.500 ms, hopper 0.750 ms "
        f"(measured on NVIDIA H200, {user})"
    ]


def test_order__falls_back_to_a_gpu_of_the_same_family(tables, caplog):
    _, shipped = tables
    tuning_table.write(shipped, "NVIDIA H100 80GB HBM3", [row(hopper=1.0, passes=2.0)])
    tuning_table.write(shipped, "NVIDIA A100-SXM4-40GB", [row(passes=1.0)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("hopper", "passes")
    assert "measured on NVIDIA H100 80GB HBM3" in caplog.text


def test_order__defaults_with_a_log_line_if_not_measured(tables, caplog):
    user, _ = tables
    tuning_table.write(user, "NVIDIA A100-SXM4-40GB", [row(hopper=1.0)])
    tuning_table.write(user, "NVIDIA H200", [row(dtype="float16", hopper=1.0), row((1024, 4096), hopper=1.0)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("passes", "triton")
    assert "not measured, default order passes, triton;" in caplog.text
    assert order((1024, 4096)) == ("hopper",) and order(dtype=torch.float16) == ("hopper",)


def test_write__replaces_older_measurements(tables):
    user, _ = tables
    tuning_table.write(user, "NVIDIA H200", [row(hopper=1.0), row((1024, 4096), hopper=1.0)])
    tuning_table.write(user, "NVIDIA H200", [row(passes=1.0)])
    assert tuning_table.read(user) == {"NVIDIA H200": [row((1024, 4096), hopper=1.0), row(passes=1.0)]}
    assert len(user.read_text().splitlines()) == 6  # one row per line, for diffs


def test_pick__auto_chooses_the_fastest_supported_backend_and_logs_why_once(tables, caplog):
    user, _ = tables
    modules = {name: f"vitkernels.ops.linear_gelu.{name}" for name in ("reference", "passes", "triton")}
    op = linear_gelu_op(modules)
    tuning_table.write(user, "NVIDIA H200", [row((5, 3), "float32", triton=1.0, passes=2.0, reference=3.0)])
    args = torch.randn(2, 5), torch.randn(3, 5), None, False  # triton requires multiples of 16
    with caplog.at_level(logging.INFO, "vitkernels"):
        for _ in range(2):
            assert op.pick("auto", torch.device("cuda", 0), *args).__name__ == modules["passes"]
    assert caplog.text.count("linear_gelu: auto chose passes; not triton: ") == 1


def test_pick__logging_does_not_break_the_graph(monkeypatch, caplog):
    monkeypatch.setattr("vitkernels.registry.op.place_of", lambda device_type: "tpu")
    monkeypatch.setattr("vitkernels.registry.op._said", set())
    x, weight = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    compiled = torch.compile(linear_gelu, backend="eager", fullgraph=True)
    with caplog.at_level(logging.INFO, "vitkernels"):
        expected = torch.nn.functional.gelu(x @ weight.T)
        torch.testing.assert_close(compiled(x, weight, backend="auto"), expected)
    assert "linear_gelu: auto chose reference; not pallas_tpu: " in caplog.text


def test_pick__ignores_a_table_of_another_version_and_a_truncated_one(tables, caplog):
    user, _ = tables
    modules = {name: f"vitkernels.ops.linear_gelu.{name}" for name in ("reference", "passes")}
    op = linear_gelu_op(modules)
    args = torch.randn(2, 5), torch.randn(3, 5), None, False
    pick = lambda: op.pick("auto", torch.device("cuda", 0), *args).__name__  # noqa: E731
    tuning_table.write(user, "NVIDIA H200", [row((5, 3), "float32", renamed=1.0, passes=2.0)])
    assert pick() == modules["passes"]
    tuning_table._fastest_first.cache_clear()
    user.write_text("{ torn")
    assert pick() == modules["passes"]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1 and str(user) in warnings[0]


def test_pick__chooses_an_outside_backend_only_if_registered_for_auto(tables):
    user, _ = tables
    modules = {name: f"vitkernels.ops.linear_gelu.{name}" for name in ("reference", "passes")}
    mine = SimpleNamespace(unsupported=lambda *args: None, run=lambda *args: None)
    tuning_table.write(user, "NVIDIA H200", [row((5, 3), "float32", mine=1.0, passes=2.0)])
    args = torch.device("cuda", 0), torch.randn(2, 5), torch.randn(3, 5), None, False
    op = linear_gelu_op(modules)
    op.register("mine", mine)
    assert op.pick("auto", *args).__name__ == modules["passes"] and op.pick("mine", *args) is mine
    op.unregister("mine")
    op.register("mine", mine, auto_for="cuda")
    assert op.pick("auto", *args) is mine
    op.register("unmeasured", SimpleNamespace(unsupported=lambda *args: "no", run=lambda *args: None), auto_for="cuda")
    tuning_table._fastest_first.cache_clear()
    assert op._order(args[0], args[1:], {}) == ("unmeasured", "mine", "passes")
    op.unregister("mine")
    assert op.pick("auto", *args).__name__ == modules["passes"]


SMALL = bench.ModelSizes(images=2, tokens=4, width=32, hidden=64, image_size=8, patch=4, device="cpu")


def test_shipped_table__names_existing_backends_and_features():
    features = {case.op: len(case.features) for case in (make() for make in bench.cases(SMALL, torch.bfloat16))}
    for rows in json.loads(tuning_table.SHIPPED.read_text()).values():
        for measured in rows:
            assert set(measured["ms"]) <= set(bench.OPS[measured["op"]].names())
            assert len(measured["features"]) == features[measured["op"]]
            assert all(ms > 0 for ms in measured["ms"].values())


def test_tune__reads_the_sizes_of_a_model():
    sizes = tune.sizes_of("vit_base_patch16_224", 8)
    assert (sizes.images, sizes.tokens, sizes.width, sizes.hidden) == (8, 197, 768, 3072)
    assert (sizes.image_size, sizes.patch) == (224, 16)


def test_tune__measures_every_backend(monkeypatch, capsys):
    """Every op's backends at a small model's sizes, with a constant clock."""
    timing = bench.Timing(1.0, 2.0, 3.0)
    monkeypatch.setattr(bench.Timing, "on_device", lambda function, milliseconds: function() and timing)
    for make in bench.cases(SMALL, torch.bfloat16):
        case = make()
        found = bench.measure(case)
        assert {name for name, ms in found.items() if ms == 2.0} >= {"reference", "triton"}
        assert tuning_table._key(tune._row(case, "bfloat16", {})) == (case.op, "bfloat16", case.features)
        tune._print(case, found | {"other": "it cannot"})
        assert "  reference      2.000 ms\n" in (out := capsys.readouterr().out) and "  skipped: it cannot" in out
        features, dtype = bench.OPS[case.op].features(*seen_arguments(case, monkeypatch))
        assert (features, dtype) == (case.features, torch.bfloat16)


def seen_arguments(case, monkeypatch):
    """Return the arguments that the op passes to its backends in this case."""
    backends = bench.OPS[case.op]
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            type(backends), "pick", lambda self, backend, device, *args: seen.extend(args) or self.get(backend)
        )
        case.call("reference")
    return seen


def test_measure__reports_a_wrong_backend(monkeypatch):
    case = bench.OpCase("mlp", (1,), 1, None, ())
    monkeypatch.setattr(bench.OpCase, "both", lambda self, name: (torch.tensor([1.0 + (name == "triton")]),))
    monkeypatch.setattr(bench.Timing, "on_device", lambda function, milliseconds: bench.Timing(1.0, 2.0, 3.0))
    found = bench.measure(case)
    assert found.pop("triton") == "wrong: differs from the reference by 1.0e+00"
    assert found == dict.fromkeys(set(bench.OPS["mlp"].names()) - {"triton"}, 2.0)


def test_measure__reports_a_backend_that_fails_and_times_the_others(monkeypatch):
    def both(self, name):
        if name == "triton":
            raise RuntimeError("cannot compile this kernel\nand a long dump")
        return (torch.ones(1),)

    monkeypatch.setattr(bench.OpCase, "both", both)
    monkeypatch.setattr(bench.Timing, "on_device", lambda function, milliseconds: bench.Timing(1.0, 2.0, 3.0))
    found = bench.measure(bench.OpCase("mlp", (1,), 1, None, ()))
    assert found.pop("triton") == "RuntimeError: cannot compile this kernel" and set(found.values()) == {2.0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs only without a GPU")
def test_tune__without_a_gpu_exits(tmp_path):
    with pytest.raises(SystemExit) as end:
        tune.main(["--table", str(tmp_path / "table.json")])
    assert "NVIDIA GPU" in str(end.value.code)
    assert not (tmp_path / "table.json").exists()


def test_tune__out_of_memory_keeps_earlier_measurements(monkeypatch, tmp_path):
    (first, *_), table = bench.cases(SMALL, torch.bfloat16), tmp_path / "table.json"

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "cases", lambda *_: [first, full])
    monkeypatch.setattr(bench, "measure", lambda case: {"reference": 2.0})
    with pytest.raises(SystemExit, match="vit_base_patch16_224 with --batch-size 128"):
        tune.main(["--table", str(table)])
    assert len(tuning_table.read(table)["NVIDIA H200"]) == 1


@pytest.mark.gpu
def test_tune__writes_the_table(tmp_path, capsys):
    table = tmp_path / "table.json"
    tune.main(["--model", "vit_digits", "--batch-size", "8", "--table", str(table)])
    (rows,) = tuning_table.read(table).values()
    assert {measured["op"] for measured in rows} == {
        "layer_norm_residual",
        "linear",
        "linear_gelu",
        "mlp",
        "patch_embed",
    }
    assert all("reference" in measured["ms"] for measured in rows)
    assert len(rows) == 7 and f"written to {table}" in capsys.readouterr().out
