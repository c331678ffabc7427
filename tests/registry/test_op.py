"""What holds for every op: a missing package is named, `auto` does without it, and torch.compile finds each backend."""

import subprocess
import sys

HIDDEN = """
import sys
for package in {packages}:
    sys.modules[package] = None  # as if it were not installed
import torch
from vitkernels import ops
from vitkernels.registry.op import backends_of
{call}
"""

# op -> the arguments of a call that each of its backends would take
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


def test_every_op_is_held_to_this():
    from vitkernels import ops

    functions = {name for name in ops.__all__ if name.islower()} - {"generalized_box_iou_loss"}
    assert functions - {"paged_attention"} == CALLS.keys()  # its own suite does the same


def test_without_triton_and_jax_every_op_still_runs_and_says_what_is_missing():
    lines = []
    for op, args in CALLS.items():
        lines += [
            f"ops.{op}({args})",
            f"for name, module in backends_of(ops.{op}).modules.items():",
            "    try:",
            f"        ops.{op}({args}, backend=name)",
            "        said = 'ran'",
            "    except ValueError as error:",
            "        said = 'named' if 'pip install' in str(error) else str(error)",
            f"    print({op!r}, name, 'imported' if module in sys.modules else 'missing', said)",
        ]
    done = run(("triton", "jax"), "\n".join(lines))
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert {op for op, _, _, said in rows if said == "ran"} == CALLS.keys()
    for op, name, state, said in rows:
        if state == "missing":  # for want of a package that its module imports
            assert said == "named", (op, name, said)
        else:  # plain PyTorch, which may refuse, say for the device's sake
            assert said in ("ran", "named") or "cannot take this call" in said, (op, name, said)
    assert sum(state == "missing" for _, _, state, _ in rows) > len(CALLS)


def test_a_wrong_name_is_answered_with_the_names():
    calls = [
        f"""
try:
    ops.{op}({args}, backend="nosuch")
except ValueError as error:
    print("known: auto" in str(error) or str(error))"""
        for op, args in CALLS.items()
    ]
    done = run((), "".join(calls))
    assert done.stdout.split("\n")[:-1] == ["True"] * len(CALLS), done.stdout + done.stderr[-2000:]


def test_a_compiled_model_may_be_the_first_to_ask_for_a_backend():
    called = ", ".join(f"ops.{op}({CALLS[op]})" for op in ("layer_norm_residual", "mlp", "linear"))
    call = f"""
from vitkernels import attention
attention._PREFERENCE["cpu"] = "pallas_flash", "triton_flash", "sdpa"
attend = attention.get("auto")
print(len(torch.compile(lambda: ({called}, attend(*[torch.ones(1, 2, 8, 32)] * 3)), fullgraph=True, backend='eager')()))
"""
    done = run((), call)
    assert done.stdout.split() == ["4"], done.stdout + done.stderr[-2000:]
