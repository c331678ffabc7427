"""`vitkernels tpu-estimate MODULE:FUNCTION`: a user's own Pallas kernel, and every way in which it can fail."""

import json

import pytest
from expecting import error

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from vitkernels.cli import main as console
from vitkernels.cli.tpu_estimate import main
from vitkernels.tpu_estimate import bounds, compiler, flops, refusals, user_kernel
from vitkernels.tpu_estimate.chips import CHIPS
from vitkernels.tpu_estimate.simulate import KernelSchedule

needs_libtpu = pytest.mark.skipif(compiler.unavailable() is not None, reason=str(compiler.unavailable()))

MODULE = """
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

def double(x, *, rows=8, interpret=False):
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] + x_ref[...]
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        kernel, grid=(x.shape[0] // rows,), in_specs=[block], out_specs=block, out_shape=shape, interpret=interpret
    )(x)

def interpreted(x, *, rows):
    jitted = jax.jit(double, static_argnames=("rows", "interpret"))
    return jitted(x, rows=rows, interpret=jax.default_backend() != "tpu")

def sorting(x):
    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.sort(x_ref[...], axis=-1)
    return pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

def plain(x):
    return x + x

number = 3
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """The name of a module with kernels, importable from the current folder."""
    (tmp_path / "some_kernels.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "some_kernels"


def estimate(target: str, shapes: str = "f32[1024,1024]", chip: str = "v5e", **keywords):
    return user_kernel.estimate(target, user_kernel.parse_shapes(shapes), keywords, CHIPS[chip])


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_estimate__reads_and_writes_each_array_once(module, chip):
    found = user_kernel.facts(estimate(f"{module}:double", chip=chip, rows=128))
    assert (found["label"], found["chip"], found["arguments"]) == ("ESTIMATE", chip, "rows=128")
    assert (found["read_bytes"], found["written_bytes"]) == (4 * 2**20, 4 * 2**20)
    assert found["bound_by"] in ("HBM", "copy waits") and found["untimed"] == []
    assert found["estimate_ms"] >= 8 * 2**20 / CHIPS[chip].hbm_bandwidth * 1e3
    assert found["matrix_flops"] == found["mxu_share"] == 0


@needs_libtpu
@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("no_such_module:f", "tpu_estimate.target"),
        ("some_kernels:no_such", "tpu_estimate.target"),
        ("some_kernels:number", "tpu_estimate.target"),
        ("some_kernels:plain", "tpu_estimate.no_pallas_call"),
        ("some_kernels:sorting", "tpu_estimate.compile"),
    ],
)
def test_estimate__errors_are_one_line(module, target, code):
    with error(code) as caught:
        estimate(target)
    assert target in str(caught.value) and "\n" not in str(caught.value)


@needs_libtpu
def test_estimate__errors_of_a_call(module):
    with error("tpu_estimate.call"):
        estimate(f"{module}:double", "f32[8]")
    with error("tpu_estimate.call"):
        estimate(f"{module}:double", columns=3)


@needs_libtpu
def test_estimate__compiles_a_kernel_that_its_module_interprets_without_a_tpu(module):
    found = [user_kernel.facts(estimate(f"{module}:{name}", rows=128)) for name in ("double", "interpreted")]
    assert found[0]["estimate_ms"] == found[1]["estimate_ms"] > 0
    assert [o["kind"] for o in found[1]["operations"]] == ["Pallas kernel"]


@needs_libtpu
def test_estimate__kernels_of_vitkernels_jax_compile_for_a_tpu():
    shape = "bf16[8,197,4,64]"
    found = user_kernel.facts(estimate("vitkernels.jax:attention", ",".join([shape] * 3)))
    assert any(o["kind"] == "Pallas kernel" for o in found["operations"]) and found["untimed"] == []
    assert found["matrix_flops"] >= 2 * 2 * 8 * 4 * 197 * 197 * 64  # both products, and their padding


@needs_libtpu
def test_estimate__out_of_vmem_gives_sizes(module):
    with error("tpu_estimate.vmem", chip="v5e", limit_bytes=16 * 2**20) as caught:
        estimate(f"{module}:double", "f32[8192,4096]", rows=1024)
    assert caught.value.fields["needed_bytes"] >= 2 * 16 * 2**20  # a block of one array, twice for the pipeline


@needs_libtpu
def test_command__tunes_and_writes_json(module, tmp_path, capsys):
    words = ["tpu-estimate", f"{module}:double", "--shapes", "f32[8192,4096]", "--tune", "rows=8,256,1024"]
    assert console.main([*words, "--json", str(tmp_path / "found.json")]) == 0
    printed = capsys.readouterr().out
    written = json.loads((tmp_path / "found.json").read_text())
    times = {row["arguments"]: row.get("estimate_ms") for row in written["rows"]}
    assert list(times) == ["rows=8", "rows=256", "rows=1024"] and times["rows=1024"] is None
    best = min(("rows=8", "rows=256"), key=lambda name: times[name])
    assert f"\nbest: {best}" in printed and "ESTIMATE" in printed and "out of VMEM" in printed


@needs_libtpu
@pytest.mark.parametrize(
    "words",
    [
        ["some_kernels", "--shapes", "f32[8]"],
        ["some_kernels:double"],
        ["some_kernels:double", "--shapes", "f32(8)"],
        ["some_kernels:double", "--shapes", "f31[8]"],
        ["some_kernels:double", "rows=8", "--shapes", "f32[8]"],
        ["some_kernels:double", "--shapes", "f32[8,128]", "--set", "rows"],
        ["some_kernels:double", "--shapes", "f32[8,128]", "--chip", "v4"],
    ],
)
def test_command__refuses_arguments_before_compiling(words, capsys, monkeypatch):
    monkeypatch.setattr(user_kernel, "compile_in", lambda *_, **__: pytest.fail("compiled"))
    assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_parse_shapes__dtypes_and_sizes():
    assert user_kernel.parse_shapes("bf16[128,197,64],s32[], float32[3]") == [
        ("bfloat16", [128, 197, 64]), ("int32", []), ("float32", [3]),
    ]  # fmt: skip


def test_parse_keywords__literals_and_text():
    words = ["a=1,2", "b=true", "c=relu,gelu", "d=(1,2),(3,4)", "e=0.5"]
    assert user_kernel.parse_keywords(words) == {
        "a": [1, 2], "b": [True], "c": ["relu", "gelu"], "d": [(1, 2), (3, 4)], "e": [0.5],
    }  # fmt: skip
    assert user_kernel.combinations({"a": [1, 2], "b": [3]}) == [{"a": 1, "b": 3}, {"a": 2, "b": 3}]
    assert user_kernel.combinations({}) == [{}]


def test_matrix_flops__counts_grids_loops_and_the_larger_branch():
    square = jnp.ones((8, 8))

    def kernel(x_ref, o_ref):
        o_ref[...] = jnp.dot(x_ref[...], x_ref[...])

    def program(x):
        y = pl.pallas_call(kernel, grid=(3,), out_shape=jax.ShapeDtypeStruct((8, 8), "float32"))(x)
        y, _ = jax.lax.scan(lambda carry, _: (carry @ x, None), y, None, length=5)
        return jax.lax.cond(y[0, 0] > 0, lambda: y, lambda: y @ x @ x)

    jaxpr = jax.make_jaxpr(program)(square)
    assert flops.matrix_flops(jaxpr) == (3 + 5 + 2) * 2 * 8**3
    assert len(flops.pallas_calls(jaxpr)) == 1


def test_matrix_flops__convolution():
    images, kernel = jnp.ones((2, 3, 8, 8)), jnp.ones((5, 3, 4, 4))
    jaxpr = jax.make_jaxpr(lambda x, w: jax.lax.conv(x, w, (4, 4), "VALID"))(images, kernel)
    assert flops.matrix_flops(jaxpr) == 2 * (2 * 5 * 2 * 2) * (3 * 4 * 4)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"read": 819 * 1000 * 8}, "HBM"),  # 8 of 10 µs
        ({"busy": {"MXU": 0.9, "VALU": 0.8}}, "MXU"),
        ({"busy": {"MXU": 0.4, "VALU": 0.5}, "stalled": 6000}, "copy waits"),
        ({"busy": {"MXU": 0.4}, "empty": 5000, "stalled": 4000}, "empty bundles"),
        ({"busy": {"MXU": 0.4, "XLU": 0.6}, "empty": 1000}, "XLU"),
        ({"cycles": 0}, "unknown"),
    ],
)
def test_binding__names_the_fullest_resource_or_wait(changes, name):
    figures = {"bundles": 10, "cycles": 15000, "issued": 9, "empty": 0, "stalled": 0, "read": 0, "written": 0}
    schedule = KernelSchedule(**(figures | changes))
    assert bounds.binding(schedule) == name
    assert (name == "unknown") == bounds.sentence(schedule).startswith("unknown")


def test_one_line__keeps_the_reason():
    message = "RuntimeError: Bad block\n  in dimension 3. See details at https://x.y/z\nPlease file an issue on it."
    assert refusals.one_line(message) == "RuntimeError: Bad block in dimension 3."
    assert len(refusals.one_line("x" * 999)) == 400


def test_vmem_needed__reads_both_sizes():
    text = "Ran out of memory in memory space vmem. Scoped allocation with size 34.50M and limit 16.00M exceeded"
    assert refusals.vmem_needed(text) == {"needed_bytes": 69 * 2**19, "limit_bytes": 2**24}
    assert refusals.vmem_needed("out of hbm: size 3G and limit 2G") == {}
