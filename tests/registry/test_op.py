"""Every op: a missing package is named, `auto` runs without it, and torch.compile finds each backend."""

import subprocess
import sys
from pathlib import Path

from example_calls import CALLS

TESTS = Path(__file__).parents[1]
HIDDEN = """
import sys
for package in {packages}:
    sys.modules[package] = None  # as if it were not installed
sys.path.insert(0, {folder!r})
import torch
from example_calls import CALLS
from vitkernels import attention, ops
from vitkernels.registry.op import op_of
{call}
"""


def run(packages, call):
    code = HIDDEN.format(packages=packages, folder=str(TESTS), call=call)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_ops__run_without_triton_and_jax_and_name_the_missing_package():
    call = """
for op, (call, *_) in CALLS.items():
    function = getattr(ops, op)
    function(**call)
    for name in op_of(function).names():
        module = op_of(function).source(name).target
        try:
            function(**call, backend=name)
            said = "ran"
        except ValueError as error:
            said = "named" if "pip install" in str(error) else error.code
        print(op, name, "imported" if module in sys.modules else "missing", said)
"""
    done = run(("triton", "jax"), call)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert {op for op, _, _, said in rows if said == "ran"} == CALLS.keys()
    for op, name, state, said in rows:
        if state == "missing":  # a package that its module imports is missing
            assert said == "named", (op, name, said)
        else:  # plain PyTorch, which may refuse, for example because of the device
            assert said in ("ran", "named", "registry.unsupported"), (op, name, said)
    assert sum(state == "missing" for _, _, state, _ in rows) > len(CALLS)


def test_ops__unknown_backend_lists_the_names():
    call = """
for op, (call, *_) in CALLS.items():
    try:
        getattr(ops, op)(**call, backend="nosuch")
    except ValueError as error:
        print(op, "auto" in error.fields["choices"])
"""
    done = run((), call)
    assert dict(line.split() for line in done.stdout.splitlines()) == dict.fromkeys(CALLS, "True"), done.stderr[-2000:]


def test_compile__imports_backends_at_trace_time():
    call = """
attention.backends.OP.auto["cpu"] = "pallas_flash", "triton_flash", "sdpa"
attend = attention.get("auto")
names = "layer_norm_residual", "mlp", "linear"

def model():
    results = [getattr(ops, name)(**CALLS[name][0]) for name in names]
    return *results, attend(*[torch.ones(1, 2, 8, 32)] * 3)

print(len(torch.compile(model, fullgraph=True, backend="eager")()))
"""
    done = run((), call)
    assert done.stdout.split() == ["4"], done.stdout + done.stderr[-2000:]


def test_constant_when_traced__equals_torchs_own_decorator():
    import torch

    from vitkernels.registry.tracing import constant_when_traced

    ours, theirs = constant_when_traced(lambda: None), torch.compiler.assume_constant_result(lambda: None)
    assert vars(ours) == vars(theirs) != {}
