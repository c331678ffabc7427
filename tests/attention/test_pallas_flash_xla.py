"""pallas_flash in torch_xla's lazy graph, in a separate process; PJRT_DEVICE=CPU stands in for the TPU."""

import importlib.util
import os
import textwrap

import forked
import pytest
from quick_xla import QUICK_XLA

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("jax", "torch_xla")), reason="needs the tpu extra"
    ),
]


def run(code: str, **environment: str) -> str:
    """Run `code`; return the last line it prints."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK_XLA, **environment}
    done = forked.run(["-c", textwrap.dedent(code)], environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_lazy_graph__forward_and_backward():
    code = """
    import torch, torch_xla
    from vitkernels import attention

    flash, native = attention.get("pallas_flash"), attention.get("native")
    # Relative to the largest value: float32 sums, and three bfloat16 roundings in sequence (out, 2 * out, qkv.grad).
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        qkv = torch.randn(2, 50, 3, 2, 64).to(dtype)
        mask = torch.rand(2, 1, 1, 50) > 0.3
        found = []
        for x, backend in ((qkv.to("xla"), flash), (qkv.double(), native)):
            x.requires_grad_()
            out = backend.qkvpacked(x, mask=mask.to(x.device))
            out.square().sum().backward()
            found.append([t.detach().cpu().double() for t in (out, x.grad)])
        for ours, exact in zip(*found):
            assert (ours - exact).abs().max() < tolerance * exact.abs().max()
    print("passed")
    """
    assert run(code) == "passed"


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_tpu_graph__compiles():
    """Compile qkv projection, attention and output projection as torch_xla builds them, with the TPU's kernel."""
    code = """
    import torch, torch_xla
    import torch_xla.core.xla_builder as xla_builder
    from vitkernels.attention.pallas_flash.tpu import dispatch
    from vitkernels.tpu_estimate import compiler
    from vitkernels.bridge.pallas_devices import Trace
    from functools import partial

    x = torch.randn(2, 197, 256, dtype=torch.bfloat16, device="xla")
    qkv = torch.nn.Linear(256, 768, dtype=torch.bfloat16, device="xla")(x)
    attend = partial(
        dispatch.attend, heads=4, scale=0.125, is_causal=False, extras=(), bias_gradient=False
    )
    module = Trace.of("flash", attend, (((2, 197, 768), torch.bfloat16),)).hlo("tpu")
    computation = xla_builder.computation_from_module_proto("flash", module)
    out = xla_builder.xla_computation_as_func(computation)([qkv])[0]
    out = torch.nn.Linear(256, 256, dtype=torch.bfloat16, device="xla")(out)
    graph = torch_xla._XLAC._get_xla_tensors_hlo_proto([out])
    assert b"tpu_custom_call" in graph
    print(compiler.compile_hlo(graph).get_compiled_memory_stats().output_size_in_bytes > 0)
    """
    assert run(code) == "True"


def test_spmd__runs_on_the_batch_shard_of_each_device():
    code = """
    import numpy as np
    import torch, torch_xla
    import torch_xla.distributed.spmd as spmd
    import torch_xla.runtime as runtime
    from vitkernels import attention

    runtime.use_spmd()
    mesh = spmd.Mesh(np.arange(4), (4, 1), ("data", "model"))
    spmd.set_global_mesh(mesh)
    x, w = torch.randn(8, 20, 384), 0.05 * torch.randn(384, 384)

    def loss(backend, x, w):
        return backend.qkvpacked((x @ w).unflatten(2, (3, 2, 64))).square().sum()

    sharded, weight = x.to("xla"), w.to("xla").requires_grad_()
    spmd.mark_sharding(sharded, mesh, ("data", None, None))
    ours = loss(attention.get("pallas_flash"), sharded, weight)
    ours.backward()
    graph = torch_xla._XLAC._get_xla_tensors_hlo([ours, weight.grad])
    assert graph.count("SPMDFullToShardShape") >= 3, "qkv forward; qkv and the gradient backward"
    assert "f32[2,20,384]" in graph
    exact = w.double().requires_grad_()
    expected = loss(attention.get("native"), x.double(), exact)
    expected.backward()
    torch.testing.assert_close(ours.cpu().double(), expected, rtol=1e-5, atol=0)
    assert (weight.grad.cpu() - exact.grad).abs().max() < 1e-5 * exact.grad.abs().max()
    print("passed")
    """
    assert run(code, CPU_NUM_DEVICES="4") == "passed"
