"""Backends of other packages: entry points and `attention.register`, each in a separate process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import forked
import pytest

ROOT = Path(__file__).resolve().parents[2]

BACKEND = """
import torch
from vitkernels.attention import AttentionBackend

class Outside(AttentionBackend):
    name = "outside"

    def refusal(self, problem):
        return "no dropout" if problem.dropout_p else None

    def run(self, q, k, v, **keywords):
        from vitkernels import attention
        return attention.get("native").run(q, k, v, **keywords)

BACKEND = Outside()
"""

ENTRY_POINTS = """
[vitkernels.attention]
outside = outside_kernels.flash:BACKEND
outside_broken = outside_kernels.broken:BACKEND
outside_module = outside_kernels.flash

[vitkernels.ops]
linear.outside = outside_kernels.linear
"""

LINEAR = """
def unsupported(x, weight, bias, is_qkv):
    return "no bias" if bias is not None else None

def run(x, weight, bias, is_qkv):
    return x @ weight.T
"""


@pytest.fixture
def python(tmp_path):
    """python(code or pytest arguments): run them with a package outside_kernels installed next to vitkernels."""
    site = tmp_path / "site"
    install(site, "outside_kernels", "1.5", ENTRY_POINTS)
    package = site / "outside_kernels"
    package.mkdir()
    for name, code in {"__init__": "", "flash": BACKEND, "broken": "1 / 0", "linear": LINEAR}.items():
        (package / f"{name}.py").write_text(code)

    def run(*arguments: str, status: int = 0) -> str:
        path = os.pathsep.join(map(str, (site, ROOT)))
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = forked.run(arguments, tmp_path, env)
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done.stdout

    return run


def install(site, name: str, version: str, entry_points: str) -> None:
    """Write the package metadata that an installer would write."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


def test_entry_point__behaves_like_a_built_in_backend(python):
    python(
        "-c",
        """
import sys, torch
from vitkernels import attention
from vitkernels.cli import doctor

assert set(attention.names()) >= {"native", "auto", "outside", "outside_broken", "outside_module"}, attention.names()
assert "outside_kernels" not in sys.modules
x = torch.randn(1, 2, 8, 32)
outside = attention.get("outside")
assert torch.equal(outside(x, x, x), attention.get("native")(x, x, x))
assert outside.qkvpacked(torch.randn(1, 8, 3, 2, 32)).shape == (1, 8, 64)
assert attention.get("outside_module") is outside
assert outside.unsupported(x, x, x, dropout_p=0.5) == "no dropout"

backends = doctor.backends()
assert backends.keys() == set(attention.names()) and backends["outside"] is None
problem = attention.Problem.of(x, x, x)
try:
    attention.choose_for_all("outside", [attention.Problem.of(x, x, x, dropout_p=0.5)])
except ValueError as error:
    assert error.fields["reason"] == "no dropout" and "outside" not in error.fields["others"], error.fields
    assert "sdpa" in error.fields["others"]
""",
    )


def test_broken_entry_point__is_reported_and_does_not_stop_others(python):
    python(
        "-c",
        """
from vitkernels import attention
from vitkernels.cli import doctor

why = attention.broken("outside_broken")
assert "outside_kernels 1.5" in why and "ZeroDivisionError" in why, why
assert doctor.backends()["outside_broken"] == why
assert attention.broken("outside") is None
try:
    attention.get("outside_broken")
except ZeroDivisionError:
    pass
else:
    raise AssertionError("the backend's import error propagates")
""",
    )


def test_entry_points__name_clash_error_lists_both_sources(python, tmp_path):
    install(tmp_path / "site", "other_kernels", "2.0", "[vitkernels.attention]\noutside = other:B\nnative = other:B\n")
    python(
        "-c",
        """
from vitkernels import attention

for name, first in (("outside", "outside_kernels 1.5"), ("native", "vitkernels.attention.native")):
    try:
        attention.get(name)
    except ValueError as error:
        assert error.code == "registry.name_clash" and error.fields["name"] == name
        sources = " ".join(error.fields["sources"])
        assert first in sources and "other_kernels 2.0" in sources, sources
        assert all(source in str(error) for source in error.fields["sources"])
    else:
        raise AssertionError(name)
    assert "other_kernels 2.0" in attention.broken(name)
    try:
        attention.register(name, attention.get("sdpa"))
    except ValueError as error:
        assert error.code == "registry.name_clash"
    assert "other_kernels 2.0" in attention.broken(name)  # a refused registration resolves nothing
attention.get("sdpa")
""",
    )


def test_auto__chooses_an_outside_backend_only_if_registered_for_auto(python):
    python(
        "-c",
        """
import torch
from vitkernels import attention

x = torch.randn(1, 2, 8, 32)
problem = attention.Problem.of(x, x, x)
auto = attention.get("auto")
auto(x, x, x)
assert attention.choose(problem)[0] == "sdpa"
attention.register("outside", "outside_kernels.flash:BACKEND", auto_for="cpu")
assert attention.choose(problem) == ("outside", {})
# The dispatch cache was cleared.
assert auto._dispatch((x, x, x), None, None, None, False, 0.0, None).name == "outside"
assert attention.choose(attention.Problem.of(x, x, x, dropout_p=0.5)) == ("sdpa", {"outside": "no dropout"})
""",
    )


def test_register__accepts_instance_module_and_string(python):
    python(
        "-c",
        """
import torch
from outside_kernels import flash
from vitkernels import attention
from vitkernels.errors import UsageError

def code(call, *args, **keywords):
    try:
        call(*args, **keywords)
    except UsageError as error:
        return error.code

mine = flash.Outside()
attention.register("instance", mine)
attention.register("module", flash, auto_for=("cuda", "cpu"))
attention.register("string", "outside_kernels.flash:BACKEND")
attention.register("string", "outside_kernels.flash:BACKEND")  # identical registration
assert attention.get("instance") is mine and attention.get("module") is attention.get("string") is flash.BACKEND
assert {"instance", "module", "string"} < set(attention.names())
assert attention.candidates("cpu")[0] == attention.candidates("cuda")[0] == "module"

assert code(attention.register, "instance", flash.Outside()) == "registry.name_clash"
assert attention.get("instance") is mine  # a refused registration changes nothing
assert code(attention.register, "sdpa", mine) == code(attention.register, "auto", mine) == "registry.name_clash"
assert attention.get("sdpa").name == "sdpa"
assert code(attention.register, "new", mine, auto_for="gpu") == "unknown_name" and "new" not in attention.names()
assert code(attention.unregister, "sdpa") == "registry.not_registered"
for wrong in (object(), flash.Outside, torch):
    assert code(attention.register, "wrong", wrong) == "registry.not_a_backend" and "wrong" not in attention.names()
attention.unregister("module")
assert "module" not in attention.names() and attention.candidates("cpu") == ("sdpa",)
attention.unregister("instance")
attention.register("instance", flash.Outside())
x = torch.randn(1, 2, 8, 32)
compiled = torch.compile(lambda x: attention.get("string")(x, x, x), backend="eager", fullgraph=True)
assert torch.equal(compiled(x), attention.get("native")(x, x, x))
""",
    )


def test_compile__loads_an_entry_point_at_trace_time(python):
    python(
        "-c",
        """
import torch
from vitkernels import attention, ops

x = torch.randn(1, 2, 8, 32)
weight = torch.randn(16, 32)
compiled = torch.compile(
    lambda x: (attention.get("outside")(x, x, x), ops.linear(x, weight, backend="outside")),
    backend="eager", fullgraph=True,
)
attended, projected = compiled(x)
assert torch.equal(attended, attention.get("native")(x, x, x)) and torch.equal(projected, x @ weight.T)
""",
    )


def test_ops__entry_points_add_backends(python):
    python(
        "-c",
        """
import torch
from vitkernels import ops
from vitkernels.registry.op import op_of

assert op_of(ops.linear).names()[-1] == "outside" and "outside" not in op_of(ops.mlp).names()
x, weight = torch.randn(3, 4), torch.randn(5, 4)
assert torch.equal(ops.linear(x, weight, backend="outside"), x @ weight.T)
try:
    ops.linear(x, weight, torch.randn(5), backend="outside")
except ValueError as error:
    assert error.code == "registry.unsupported" and error.fields["reason"] == "no bias"
else:
    raise AssertionError
assert op_of(ops.linear).pick("auto", x.device, x, weight, None, False).__name__.endswith("reference")
""",
    )


def test_conformance__runs_for_an_outside_backend(python, tmp_path):
    (tmp_path / "test_outside.py").write_text(
        "from vitkernels.testing import AttentionConformance\n\n\n"
        'class TestOutside(AttentionConformance):\n    backend = "outside"\n\n\n'
        "from outside_kernels.flash import Outside\n\n\n"
        "class Wrong(Outside):\n    def run(self, q, k, v, **keywords):\n"
        "        return super().run(q, k, v, **keywords) * 1.001\n\n\n"
        "class TestWrong(AttentionConformance):\n    backend = Wrong()\n"
    )
    options = "-q", "-p", "no:cacheprovider", "-W", "error", "--tb=no", "-rf"
    options += "-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"  # by the server that forks
    few = "cpu and (causal or cross or masks or invalid or dropout or autocast or bias)"
    printed = python("-m", "pytest", *options, "-k", few, "test_outside.py", status=1)
    counts = printed.strip().splitlines()[-1]
    assert "FAILED test_outside.py::TestOutside" not in printed, printed
    count = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", counts)}
    assert printed.count("FAILED test_outside.py::TestWrong") == count["failed"] > 10
    assert count["skipped"] == 2 and count["passed"] > 20, counts  # it does not support dropout
    assert sum(count[word] for word in ("failed", "passed", "skipped", "deselected")) == 2 * 434, counts


def test_pytest__is_imported_only_by_the_testing_package():
    code = (
        "import sys, vitkernels.attention, vitkernels.ops; vitkernels.attention.names(); print('pytest' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
