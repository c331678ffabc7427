"""paged_attention in torch_xla's lazy graph (PJRT_DEVICE=CPU replaces the TPU).

All checks run in one subprocess, because importing torch_xla takes longer than the checks.
"""

import importlib.util
import json
import os
import sys
import traceback
from pathlib import Path

import forked
import pytest
from quick_xla import QUICK_XLA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("jax", "torch_xla")), reason="needs the tpu extra"
    ),
]
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def agrees_with_torch_xla():
    """Compare with torch_xla's multi-query form, which also runs off a TPU, unlike its paged_attention."""
    import torch
    import torch_xla
    import torch_xla.debug.metrics as metrics
    from test_paged_attention import exact, make, relative_error
    from torch_xla.experimental.custom_kernel import multi_queries_paged_attention

    from vitkernels.ops import paged_attention

    tensors = make("cpu", [1, 19, 16, 48], table_dtype=torch.int64)  # torch_xla does not support a length of 0
    tensors = [t.nan_to_num() if t.is_floating_point() else t.clamp(0, 10**6) for t in tensors]
    tensors[4].clamp_(0, 19)  # and reads every entry of the table
    query, key_cache, value_cache, lens, table = lazy = [t.to("xla") for t in tensors]
    ones = torch.ones_like(lens).int()
    theirs = multi_queries_paged_attention(
        query[:, None], key_cache, value_cache, lens.int(), table.int(), ones, 2, 1, use_kernel=False
    )
    theirs = theirs[:, 0].cpu()
    torch_xla.sync()
    metrics.clear_all()
    ours = {name: paged_attention(*lazy, 2, backend=name) for name in ("pallas_tpu", "reference", "auto")}
    table[0, 0] = 20
    broken = paged_attention(*lazy, 2, backend="pallas_tpu")
    assert metrics.metric_data("TransferFromDeviceTime") is None, "a device-to-host transfer happened"
    assert "paged_attention_tpu" in torch_xla._XLAC._get_xla_tensors_text([ours["pallas_tpu"]])
    torch_xla.sync()  # all in one program
    for out in ours.values():
        assert relative_error(out.cpu(), exact(*tensors)) < 3e-6
        assert relative_error(out.cpu(), theirs.double()) < 3e-6
    assert broken[0].isnan().all() and broken[1:].isfinite().all()


def has_torch_xlas_signature():
    import inspect

    import torch
    import torch_xla.experimental.custom_kernel  # noqa: F401  registers it

    from vitkernels.ops import paged_attention

    theirs = torch.ops.xla.paged_attention.default._schema.arguments
    ours = [p for p in inspect.signature(paged_attention).parameters.values() if p.kind != p.KEYWORD_ONLY]
    assert len(theirs) == 8
    assert [a.has_default_value() for a in theirs] == [p.default is not p.empty for p in ours]
    assert [a.name for a in theirs[5:]] == [p.name for p in ours[5:]]
    assert [a.default_value for a in theirs[6:]] == [p.default for p in ours[6:]]


def compiles_in_a_tpus_graph(head_dim: int):
    """Compile a torch_xla graph of projection, paged attention with the TPU kernel, and projection."""
    from functools import partial

    import torch
    import torch_xla
    import torch_xla.core.xla_builder as xla_builder

    from vitkernels.bridge.pallas_devices import Trace
    from vitkernels.ops.paged_attention.tpu.attend import attend
    from vitkernels.tpu_estimate import compiler

    B, K, P, S, T, D = 4, 2, 32, 16, 8, head_dim
    kernel = partial(attend, pages_per_compute_block=4, megacore_mode=None, soft_cap=None)
    like = {"dtype": torch.bfloat16, "device": "xla"}
    tensors = [
        torch.nn.Linear(64, K * D, **like)(torch.randn(B, 64, **like)).view(B, K, D),
        torch.randn(K, P, S, D, **like),
        torch.randn(K, P, S, D, **like),
        torch.full((B,), 20, dtype=torch.int32, device="xla"),
        torch.randint(0, P, (B, T), device="xla").int(),
    ]
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors)
    module = Trace.of("paged", kernel, shapes).hlo("tpu")
    computation = xla_builder.computation_from_module_proto("paged", module)
    out = xla_builder.xla_computation_as_func(computation)(tensors)[0]
    out = torch.nn.Linear(K * D, 64, **like)(out.flatten(1))
    graph = torch_xla._XLAC._get_xla_tensors_hlo_proto([out])
    assert b"tpu_custom_call" in graph
    assert compiler.compile_hlo(graph).get_compiled_memory_stats().output_size_in_bytes > 0


CHECKS = {
    "agrees": agrees_with_torch_xla,
    "signature": has_torch_xlas_signature,
    "compiles, 64": lambda: compiles_in_a_tpus_graph(64),
    "compiles, 128": lambda: compiles_in_a_tpus_graph(128),
}


def run_all() -> None:
    """Print a line of JSON: check -> its traceback, or null if it passed. Runs in the subprocess."""
    failures = {}
    for name, check in CHECKS.items():
        try:
            check()
            failures[name] = None
        except Exception:
            failures[name] = traceback.format_exc()
    print(json.dumps(failures))


@pytest.fixture(scope="module")
def failures() -> dict[str, str | None]:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK_XLA, "PYTHONPATH": path}
    done = forked.run(["-c", f"import {__name__} as checks; checks.run_all()"], environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@pytest.mark.parametrize(
    "name", ["agrees", "signature", *[pytest.param(f"compiles, {d}", marks=needs_libtpu) for d in (64, 128)]]
)
def test_paged_attention_xla__passes_in_a_torch_xla_process(name, failures):
    assert failures[name] is None, failures[name]
