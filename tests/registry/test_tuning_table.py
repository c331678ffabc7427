"""What `auto` tries first on a GPU: the user's measurements, then those that ship, then the default; and tune."""

import json
import logging

import pytest
import torch

from vitkernels.benchmarks import ops as bench
from vitkernels.cli import tune
from vitkernels.ops import linear_gelu
from vitkernels.registry import tuning_table
from vitkernels.registry.op import Op


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """A user's cache and a shipped table of this test's own, on a machine whose GPU is an H200."""
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


def test_the_users_measurements_come_first(tables, caplog):
    user, shipped = tables
    tuning_table.write(shipped, "NVIDIA H200", [row(hopper=1.0, passes=2.0)])
    tuning_table.write(user, "NVIDIA H200", [row(triton=0.5, hopper=0.75)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("triton", "hopper")
    assert caplog.messages == [
        "linear_gelu 768 x 3072 bfloat16 on NVIDIA H200: triton 0.500 ms, hopper 0.750 ms "
        f"(measured on NVIDIA H200, {user})"
    ]


def test_a_gpu_of_the_same_family_serves(tables, caplog):
    _, shipped = tables
    tuning_table.write(shipped, "NVIDIA H100 80GB HBM3", [row(hopper=1.0, passes=2.0)])
    tuning_table.write(shipped, "NVIDIA A100-SXM4-40GB", [row(passes=1.0)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("hopper", "passes")
    assert "measured on NVIDIA H100 80GB HBM3" in caplog.text


def test_what_was_never_measured_is_said(tables, caplog):
    user, _ = tables
    tuning_table.write(user, "NVIDIA A100-SXM4-40GB", [row(hopper=1.0)])
    tuning_table.write(user, "NVIDIA H200", [row(dtype="float16", hopper=1.0), row((1024, 4096), hopper=1.0)])
    with caplog.at_level(logging.INFO, "vitkernels"):
        assert order() == ("passes", "triton")
    assert "was never measured: passes, triton, in this order; `python -m vitkernels.tune` measures" in caplog.text
    assert order((1024, 4096)) == ("hopper",) and order(dtype=torch.float16) == ("hopper",)


def test_new_measurements_replace_old_ones(tables):
    user, _ = tables
    tuning_table.write(user, "NVIDIA H200", [row(hopper=1.0), row((1024, 4096), hopper=1.0)])
    tuning_table.write(user, "NVIDIA H200", [row(passes=1.0)])
    assert tuning_table.read(user) == {"NVIDIA H200": [row((1024, 4096), hopper=1.0), row(passes=1.0)]}
    assert len(user.read_text().splitlines()) == 6  # a row a line, to be read and compared


def test_auto_takes_the_fastest_that_can_and_says_why(tables, caplog):
    user, _ = tables
    modules = {name: f"vitkernels.ops.linear_gelu.{name}" for name in ("reference", "passes", "triton")}
    op = linear_gelu_op(modules)
    tuning_table.write(user, "NVIDIA H200", [row((5, 3), "float32", triton=1.0, passes=2.0, reference=3.0)])
    args = torch.randn(2, 5), torch.randn(3, 5), None, False  # triton wants multiples of 16
    with caplog.at_level(logging.INFO, "vitkernels"):
        for _ in range(2):
            assert op.pick("auto", torch.device("cuda", 0), *args).__name__ == modules["passes"]
    assert caplog.text.count("linear_gelu: auto chose passes; not triton: ") == 1


def test_what_auto_says_breaks_no_graph(monkeypatch, caplog):
    monkeypatch.setattr("vitkernels.registry.op.place_of", lambda device_type: "tpu")
    monkeypatch.setattr("vitkernels.registry.op._said", set())
    x, weight = torch.randn(2, 5, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    compiled = torch.compile(linear_gelu, backend="eager", fullgraph=True)
    with caplog.at_level(logging.INFO, "vitkernels"):
        expected = torch.nn.functional.gelu(x @ weight.T)
        torch.testing.assert_close(compiled(x, weight, backend="auto"), expected)
    assert "linear_gelu: auto chose reference; not pallas_tpu: " in caplog.text


def test_a_table_of_another_version_or_a_broken_one_stops_nothing(tables, caplog):
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
    assert f"{user} cannot be read" in caplog.text


SMALL = bench.ModelSizes(images=2, tokens=4, width=32, hidden=64, image_size=8, patch=4, device="cpu")


def test_the_shipped_table_is_of_backends_and_features_that_exist():
    features = {case.op: len(case.features) for case in (make() for make in bench.cases(SMALL, torch.bfloat16))}
    for rows in json.loads(tuning_table.SHIPPED.read_text()).values():
        for measured in rows:
            assert set(measured["ms"]) <= set(bench.OPS[measured["op"]].names())
            assert len(measured["features"]) == features[measured["op"]]
            assert all(ms > 0 for ms in measured["ms"].values())


def test_sizes_of_models():
    sizes = tune.sizes_of("vit_base_patch16_224", 8)
    assert (sizes.images, sizes.tokens, sizes.width, sizes.hidden) == (8, 197, 768, 3072)
    assert (sizes.image_size, sizes.patch) == (224, 16)


def test_what_tune_measures(monkeypatch, capsys):
    """Every op's backends at a small model's sizes; here with a clock that stands still."""
    timing = bench.Timing(1.0, 2.0, 3.0)
    monkeypatch.setattr(bench.Timing, "on_device", lambda function, milliseconds: function() and timing)
    for make in bench.cases(SMALL, torch.bfloat16):
        case = make()
        found = bench.measure(case)
        assert {name for name, ms in found.items() if ms == 2.0} >= {"reference", "triton"}
        assert tuning_table._key(tune._row(case, "bfloat16", {})) == (case.op, "bfloat16", case.features)
        tune._print(case, found | {"other": "it cannot"})
        assert "  reference      2.000 ms\n" in (out := capsys.readouterr().out) and "  not: it cannot" in out
        features, dtype = bench.OPS[case.op].features(*seen_arguments(case, monkeypatch))
        assert (features, dtype) == (case.features, torch.bfloat16)


def seen_arguments(case, monkeypatch):
    """What the op hands to its backends in this case."""
    backends = bench.OPS[case.op]
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(
            type(backends), "pick", lambda self, backend, device, *args: seen.extend(args) or self.get(backend)
        )
        case.call("reference")
    return seen


def test_a_wrong_backend_is_not_measured(monkeypatch):
    case = bench.OpCase("mlp", (1,), 1, None, ())
    monkeypatch.setattr(bench.OpCase, "both", lambda self, name: (torch.tensor([1.0 + (name == "triton")]),))
    monkeypatch.setattr(bench.Timing, "on_device", lambda function, milliseconds: bench.Timing(1.0, 2.0, 3.0))
    assert bench.measure(case) == {
        "reference": 2.0,
        "passes": 2.0,
        "triton": "wrong: differs from the reference by 1.0e+00",
        "pallas_hopper": 2.0,
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_tune_says_so(tmp_path):
    with pytest.raises(SystemExit, match="PyTorch sees none here"):
        tune.main(["--table", str(tmp_path / "table.json")])
    assert not (tmp_path / "table.json").exists()


def test_what_was_measured_before_the_memory_was_full_is_kept(monkeypatch, tmp_path):
    (first, *_), table = bench.cases(SMALL, torch.bfloat16), tmp_path / "table.json"

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(bench, "cases", lambda *_: [first, full])
    monkeypatch.setattr(bench, "measure", lambda case: {"reference": 2.0})
    with pytest.raises(SystemExit, match="--batch-size 128 does not fit this GPU"):
        tune.main(["--table", str(table)])
    assert len(tuning_table.read(table)["NVIDIA H200"]) == 1


@pytest.mark.gpu
def test_tune_measures_and_says_where(tmp_path, capsys):
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
    assert len(rows) == 7 and f"written: {table}" in capsys.readouterr().out
