"""pallas_op in torch_xla's lazy graph, each case in a separate process.

Some cases test the import order, and PyTorch's autograd engine must see torch_xla before its first backward pass.
PJRT_DEVICE=CPU stands in for the TPU; libtpu compiles the TPU's graph.
"""

import importlib.util
import os
import textwrap

import forked
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("jax", "torch_xla")), reason="needs the tpu extra"
    ),
]
HAS_LIBTPU = importlib.util.find_spec("libtpu") is not None


def run(code: str, **environment: str) -> str:
    """Run `code`; return the last line it prints."""
    environment = {**os.environ, "PJRT_DEVICE": "CPU", **environment}
    done = forked.run(["-c", textwrap.dedent(code)], environment=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip().splitlines()[-1]


def test_examples__with_torch_xla_imported_first():
    code = """
    import torch, torch_xla
    from vitkernels.bridge.examples.quickstart import add_vectors, iota, matmul
    import jax
    assert jax.config.jax_platforms == "cpu"

    x, y = (torch.randn(8, 128, device="xla", requires_grad=True) for _ in range(2))
    torch.testing.assert_close(add_vectors(x, y).cpu(), x.cpu() + y.cpu())
    assert iota(length=300, device="xla").cpu().tolist() == list(range(300))

    a, b = torch.randn(32, 64, requires_grad=True), torch.randn(64, 16, requires_grad=True)
    xa, xb = (t.detach().to("xla").requires_grad_() for t in (a, b))
    out, expected = matmul(xa, xb, activation="relu", block=(16, 16, 32)), torch.relu(a @ b)
    torch.testing.assert_close(out.cpu(), expected, atol=5e-5, rtol=1e-5)
    out.sum().backward(), expected.sum().backward()
    for ours, theirs in ((xa, a), (xb, b)):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=5e-5, rtol=1e-5)

    batched = torch.func.vmap(matmul, in_dims=(0, None))(torch.ones(3, 8, 64, device="xla"), xb.detach())
    torch.testing.assert_close(batched.cpu(), torch.ones(3, 8, 64) @ b.detach(), atol=5e-5, rtol=1e-5)
    print("passed")
    """
    assert run(code) == "passed"


def test_jax_imported_first__stays_lazy_and_traces_once():
    code = """
    import jax
    import jax.numpy as jnp
    import torch, torch_xla
    import torch_xla.debug.metrics as metrics
    from vitkernels.bridge import pallas_op

    traced = []
    def count(x):
        traced.append(x.shape)
        return jnp.sin(x) * 2
    op = pallas_op(count)
    x = torch.randn(4, 4).to("xla")
    torch_xla.sync()
    metrics.clear_all()
    for _ in range(3):
        x = op(op(x))
    assert metrics.metric_data("TransferFromDeviceTime") is None, "the host was involved"
    assert "xla__count" in torch_xla._XLAC._get_xla_tensors_text([x]).replace("::", "__")
    torch_xla.sync()
    assert traced == [(4, 4)] and x.device.type == "xla"
    try:
        op(x, torch.zeros(2))
    except ValueError as error:
        print(error.code, error.fields["devices"])
    """
    assert run(code) == "bridge.mixed_devices ['cpu', 'xla:0']"


def test_bridge_imported_first__keeps_jax_off_the_tpu():
    code = """
    import sys
    import vitkernels
    assert not {"jax", "torch_xla"} & set(sys.modules)
    from vitkernels.bridge import pallas_op
    import jax
    print(jax.config.jax_platforms, sorted(d.platform for d in jax.devices()))
    """
    assert run(code, JAX_PLATFORMS="") == "cpu ['cpu']"


def test_jax_platforms_tpu__raises():
    code = """
    import torch_xla
    try:
        from vitkernels.bridge import pallas_op
    except ValueError as error:
        print(error.code)
    """
    assert run(code, JAX_PLATFORMS="tpu,cpu") == "bridge.tpu_requested"


@pytest.mark.skipif(not HAS_LIBTPU, reason="needs libtpu")
def test_tpu_graph__compiles():
    code = """
    import torch, torch_xla
    import torch_xla.core.xla_builder as xla_builder
    from vitkernels.tpu_estimate import compiler
    from vitkernels.bridge.examples.quickstart import matmul_jax
    from vitkernels.bridge.pallas_devices import Trace

    x, y = (torch.randn(256, 256, dtype=torch.bfloat16, device="xla") for _ in range(2))
    trace = Trace.of("matmul", matmul_jax, (((256, 256), torch.bfloat16),) * 2)
    computation = xla_builder.computation_from_module_proto("matmul", trace.hlo("tpu"))
    out = xla_builder.xla_computation_as_func(computation)([torch.relu(x), y])[0] * 2
    module = torch_xla._XLAC._get_xla_tensors_hlo_proto([out])
    assert b"tpu_custom_call" in module
    compiled = compiler.compile_hlo(module)
    print(compiled.get_compiled_memory_stats().output_size_in_bytes)
    """
    assert run(code) == str(256 * 256 * 2)
