"""The Hopper kernel of linear: interpreted on the CPU, lowered on any machine, and run on a GPU.

On a GPU the conformance suite runs it too.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from hopper import error, needs_new_jax

from vitkernels.ops import linear
from vitkernels.ops.linear import pallas_hopper
from vitkernels.ops.linear_gelu import pallas_hopper as gelu_hopper

TOLERANCE = {torch.bfloat16: 2.5e-3, torch.float16: 4e-4}  # relative to the norm: one rounding


# Blocks and consumers with and without tiles, more steps than ring slots, rows out of bounds, both tile widths.
@needs_new_jax
@pytest.mark.parametrize(
    "M, N, K, dtype, has_bias",
    [(72, 384, 192, torch.bfloat16, True), (136, 256, 512, torch.float16, False), (40, 128, 64, torch.bfloat16, True)],
)
def test_linear_hopper__matches_float64_interpreted(M, N, K, dtype, has_bias):
    import jax.numpy as jnp

    from vitkernels.ops.linear.pallas_hopper_kernel import LinearProduct

    name = str(dtype).removeprefix("torch.")
    x, weight, bias = torch.randn(M, K).to(dtype), (torch.randn(N, K) * K**-0.5).to(dtype), torch.randn(N)
    given = [jnp.asarray(t.float().numpy(), name) for t in (x, weight)]
    given += [jnp.asarray(bias.numpy())] if has_bias else []
    (y,) = LinearProduct(M, N, K, name, 1, has_bias, interpret=True)(*given)
    exact = F.linear(x.double(), weight.double(), bias.double() if has_bias else None)
    assert y.dtype == name and error(torch.tensor(y.astype("float32").tolist()), exact) < TOLERANCE[dtype]


@needs_new_jax
@pytest.mark.parametrize("N, K, dtype", [(3072, 1024, "bfloat16"), (1024, 1024, "float16")])
def test_linear_hopper__lowers_for_the_gpu(N, K, dtype):
    """Mosaic GPU checks layouts, copies and shared memory on any machine; only ptxas needs a GPU machine."""
    from vitkernels.bridge.mosaic_gpu import mosaic_module
    from vitkernels.ops.linear.pallas_hopper_kernel import LinearProduct

    for has_bias in (False, True):
        product = LinearProduct(25216, N, K, dtype, 66, has_bias)
        assert mosaic_module(product, product.inputs()).startswith(b"ML")  # MLIR bytecode


@pytest.mark.parametrize("op, instead", [(pallas_hopper, "triton"), (gelu_hopper, "passes")])
def test_linear_hopper__refuses_unsupported_products(monkeypatch, op, instead):
    def reason(rows=(2, 20), K=64, N=128, dtype=torch.bfloat16, device="cuda"):
        x = SimpleNamespace(shape=torch.Size((*rows, K)), dtype=dtype, device=torch.device(device))
        return op.unsupported(x, SimpleNamespace(shape=torch.Size((N, K))), None, False)

    if pallas_hopper._reason is not None:
        assert pallas_hopper._reason in reason()
    monkeypatch.setattr(pallas_hopper, "_reason", None)  # as on a Hopper GPU; nothing is launched
    assert reason() is None
    assert "x is on cpu" in reason(device="cpu")
    assert "torch.float32" in reason(dtype=torch.float32)
    assert "weight is 128 x 80" in reason(K=80)
    assert "weight is 192 x 64" in reason(N=192)
    assert "x has 39" in reason(rows=(3, 13))
    assert f"x has 0. Use backend={instead!r}" in reason(rows=(0, 16))


def on_hopper(test):
    reason = pallas_hopper._reason
    return pytest.mark.gpu(pytest.mark.skipif(reason is not None, reason=str(reason))(test))


def draw(M, K, N, dtype):
    """Return x in `dtype`, and weight and bias in float32, as under autocast."""
    shapes = (M, K), (N, K), (N,)
    scales = 1.0, K**-0.5, 1.0
    x, weight, bias = (torch.randn(s, device="cuda") * scale for s, scale in zip(shapes, scales, strict=True))
    return x.to(dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def results(leaves, dtype, **settings):
    with torch.autocast("cuda", dtype):
        out = linear(*leaves, backend="pallas_hopper", **settings)
    return out, *torch.autograd.grad(out.double().square().sum() / 2, leaves)


@on_hopper
@pytest.mark.parametrize(
    "M, K, N, dtype",
    [
        (8, 64, 128, torch.float16),
        (25216, 192, 384, torch.bfloat16),
        (25216, 1024, 3072, torch.bfloat16),
        (1576, 1024, 1024, torch.bfloat16),
        (33000, 768, 2304, torch.float16),
    ],
)
def test_linear_hopper__matches_float64(M, K, N, dtype):
    leaves = draw(M, K, N, dtype)
    x, weight, bias = (t.detach().double() for t in leaves)
    exact = F.linear(x, weight.to(dtype).double(), bias)
    out, dx, dweight, dbias = results(leaves, dtype)
    assert error(out, exact) < TOLERANCE[dtype]
    dy = out.double()
    for found, expected in ((dx, dy @ weight), (dweight, dy.mT @ x), (dbias, dy.sum(0))):
        assert error(found, expected) < 2 * TOLERANCE[dtype]
    with torch.autocast("cuda", dtype):
        assert error(linear(*leaves[:2], backend="pallas_hopper"), exact - bias) < TOLERANCE[dtype]


@on_hopper
def test_linear_hopper__is_bitwise_reproducible():
    leaves = draw(4096, 768, 2304, torch.bfloat16)
    for x, y in zip(*(results(leaves, torch.bfloat16, is_qkv=True) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@on_hopper
def test_linear_hopper__runs_in_cuda_graphs_and_on_unaligned_tensors():
    x, weight, bias = (t.detach() for t in draw(128, 128, 256, torch.bfloat16))
    weight = weight.to(x.dtype)
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    expected = linear(shifted, weight, bias, backend="pallas_hopper")
    assert torch.equal(expected, linear(x, weight, bias, backend="pallas_hopper"))
    assert torch.equal(expected, linear(x.mT.contiguous().mT, weight, bias, backend="pallas_hopper"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear(x, weight, bias, backend="pallas_hopper")
    x.neg_()
    graph.replay()
    assert torch.equal(out, linear(x, weight, bias, backend="pallas_hopper"))


@on_hopper
def test_linear_hopper__compiles_to_one_graph():
    leaves = draw(256, 128, 384, torch.bfloat16)

    def run(*leaves):
        with torch.autocast("cuda", torch.bfloat16):
            return linear(*leaves, is_qkv=True, backend="pallas_hopper") * 2

    compiled = torch.compile(run, fullgraph=True)
    ours = compiled(*leaves)
    torch.testing.assert_close(ours, run(*leaves))
    assert all(g.isfinite().all() for g in torch.autograd.grad(ours.sum(), leaves))
