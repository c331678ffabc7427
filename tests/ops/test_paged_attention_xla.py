"""paged_attention inside torch_xla's lazy graph, in a process of its own (PJRT_DEVICE=CPU stands for the TPU)."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax", "torch_xla")), reason="needs the tpu extra"
)


def run(code: str) -> str:
    """The last line that `code` prints."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_it_stays_in_the_graph_and_agrees_with_torch_xla():
    """torch_xla's paged_attention has no implementation off a TPU; its form for several queries has, and takes one."""
    code = """
    import torch, torch_xla
    import torch_xla.debug.metrics as metrics
    from torch_xla.experimental.custom_kernel import multi_queries_paged_attention
    from test_paged_attention import error, exact, make
    from vitkernels.ops import paged_attention

    tensors = make("cpu", [1, 19, 16, 48], table_dtype=torch.int64)  # theirs has no length of 0
    tensors = [t.nan_to_num() if t.is_floating_point() else t.clamp(0, 10**6) for t in tensors]
    tensors[4].clamp_(0, 19)  # and looks at every entry of the table
    query, key_cache, value_cache, lens, table = lazy = [t.to("xla") for t in tensors]
    theirs = multi_queries_paged_attention(
        query[:, None], key_cache, value_cache, lens.int(), table.int(), torch.ones_like(lens).int(), 2, 1,
        use_kernel=False,
    )[:, 0].cpu()
    torch_xla.sync()
    metrics.clear_all()
    ours = {name: paged_attention(*lazy, 2, backend=name) for name in ("pallas_tpu", "reference", "auto")}
    table[0, 0] = 20
    broken = paged_attention(*lazy, 2, backend="pallas_tpu")
    assert metrics.metric_data("TransferFromDeviceTime") is None, "the host was involved"
    assert "paged_attention_tpu" in torch_xla._XLAC._get_xla_tensors_text([ours["pallas_tpu"]])
    for out in ours.values():
        assert error(out.cpu(), exact(*tensors)) < 3e-6 and error(out.cpu(), theirs.double()) < 3e-6
    assert broken[0].isnan().all() and broken[1:].isfinite().all()
    print("passed")
    """
    assert run(code) == "passed"


def test_the_signature_is_torch_xlas():
    code = """
    import inspect
    import torch, torch_xla.experimental.custom_kernel
    from vitkernels.ops import paged_attention

    theirs = torch.ops.xla.paged_attention.default._schema.arguments
    ours = [p for p in inspect.signature(paged_attention).parameters.values() if p.kind != p.KEYWORD_ONLY]
    assert [a.has_default_value() for a in theirs] == [p.default is not p.empty for p in ours]
    assert [a.name for a in theirs[5:]] == [p.name for p in ours[5:]]
    assert [a.default_value for a in theirs[6:]] == [p.default for p in ours[6:]]
    print(len(theirs))
    """
    assert run(code) == "8"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
@pytest.mark.parametrize("head_dim", [64, 128])
def test_the_graph_a_tpu_would_run_compiles(head_dim):
    """Projection, tables from the graph, attention, projection, as torch_xla builds them, with the TPU's kernel."""
    code = f"""
    import torch, torch_xla
    import torch_xla.core.xla_builder as xla_builder
    from functools import partial
    from vitkernels.bench import tpu_static
    from vitkernels.bridge.pallas_devices import Trace
    from vitkernels.ops.paged_attention import pallas_tpu_kernel

    B, K, P, S, T, D = 4, 2, 32, 16, 8, {head_dim}
    attend = partial(pallas_tpu_kernel.attend, pages_per_compute_block=4, megacore_mode=None, soft_cap=None)
    like = dict(dtype=torch.bfloat16, device="xla")
    tensors = [
        torch.nn.Linear(64, K * D, **like)(torch.randn(B, 64, **like)).view(B, K, D),
        torch.randn(K, P, S, D, **like), torch.randn(K, P, S, D, **like),
        torch.full((B,), 20, dtype=torch.int32, device="xla"),
        torch.randint(0, P, (B, T), device="xla").int(),
    ]
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
    module = Trace.of("paged", attend, shapes).hlo("tpu")
    computation = xla_builder.computation_from_module_proto("paged", module)
    out = xla_builder.xla_computation_as_func(computation)(tensors)[0]
    out = torch.nn.Linear(K * D, 64, **like)(out.flatten(1))
    graph = torch_xla._XLAC._get_xla_tensors_hlo_proto([out])
    assert b"tpu_custom_call" in graph
    print(tpu_static.compile_hlo(graph).get_compiled_memory_stats().output_size_in_bytes > 0)
    """
    assert run(code) == "True"
