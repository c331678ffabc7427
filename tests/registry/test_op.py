"""Every op: a missing package is named, `auto` runs without it, and torch.compile finds each backend."""

import subprocess
import sys

HIDDEN = """
import sys
for package in {packages}:
    sys.modules[package] = None  # as if it were not installed
import torch
from vitkernels import ops
from vitkernels.registry.op import op_of
{call}
"""

# op -> the arguments of a call that each of its backends takes on its device
CALLS = {
    "cross_entropy": "torch.randn(2, 3), torch.tensor([0, 2])",
    "generalized_box_iou": "torch.rand(2, 3, 4), torch.rand(2, 3, 4)",
    "int8_matmul": "torch.ones(16, 16, dtype=torch.int8), torch.ones(16, 16, dtype=torch.int8)",
    "layer_norm_residual": "torch.randn(2, 8), None, torch.ones(8), torch.zeros(8)",
    "linear": "torch.randn(2, 16), torch.randn(16, 16)",
    "linear_gelu": "torch.randn(2, 16), torch.randn(16, 16), torch.randn(16)",
    "mlp": "torch.randn(2, 16), torch.randn(16, 16), torch.randn(16), torch.randn(16, 16)",
    "patch_embed": "torch.randn(1, 1, 4, 4), torch.randn(8, 1, 2, 2)",
    "quantized_matmul": "torch.randn(2, 16), torch.ones(16, 16, dtype=torch.int8), torch.ones(16)",
}


def run(packages, call):
    code = HIDDEN.format(packages=packages, call=call)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_calls__cover_every_op():
    from vitkernels import ops

    functions = {name for name in ops.__all__ if name.islower()} - {"generalized_box_iou_loss"}
    assert functions - {"paged_attention"} == CALLS.keys()  # tested in its own suite


def test_ops__without_triton_and_jax_run_and_name_the_missing_package():
    lines = []
    for op, args in CALLS.items():
        lines += [
            f"ops.{op}({args})",
            f"for name in op_of(ops.{op}).names():",
            f"    module = op_of(ops.{op}).source(name).target",
            "    try:",
            f"        ops.{op}({args}, backend=name)",
            "        said = 'ran'",
            "    except ValueError as error:",
            "        said = 'named' if 'pip install' in str(error) else error.code",
            f"    print({op!r}, name, 'imported' if module in sys.modules else 'missing', said)",
        ]
    done = run(("triton", "jax"), "\n".join(lines))
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
    calls = [
        f"""
try:
    ops.{op}({args}, backend="nosuch")
except ValueError as error:
    print("auto" in error.fields["choices"] or str(error))"""
        for op, args in CALLS.items()
    ]
    done = run((), "".join(calls))
    assert done.stdout.split("\n")[:-1] == ["True"] * len(CALLS), done.stdout + done.stderr[-2000:]


def test_compile__imports_backends_at_trace_time():
    called = ", ".join(f"ops.{op}({CALLS[op]})" for op in ("layer_norm_residual", "mlp", "linear"))
    call = f"""
from vitkernels import attention
attention.backends.OP.auto["cpu"] = "pallas_flash", "triton_flash", "sdpa"
attend = attention.get("auto")
print(len(torch.compile(lambda: ({called}, attend(*[torch.ones(1, 2, 8, 32)] * 3)), fullgraph=True, backend='eager')()))
"""
    done = run((), call)
    assert done.stdout.split() == ["4"], done.stdout + done.stderr[-2000:]
