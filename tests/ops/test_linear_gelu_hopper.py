"""The Hopper kernels of linear_gelu and mlp: interpreted on the CPU, lowered on any machine, and run on a GPU.

On a GPU the conformance suite runs them too.
"""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("triton")
from hopper import error, needs_new_jax

from vitkernels.ops import linear_gelu, mlp
from vitkernels.ops.linear import pallas_hopper as linear_hopper

TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 5e-4}  # relative to the norm: one rounding, or its mean over sums


def gelu_and_slope(pre, tanh):
    leaf = pre.double().requires_grad_()
    act = F.gelu(leaf, approximate="tanh" if tanh else "none")
    return act.detach(), torch.autograd.grad(act.sum(), leaf)[0]


# Blocks and consumers with and without tiles, more steps than ring slots, rows out of bounds, both tile widths.
@needs_new_jax
@pytest.mark.parametrize(
    "M, N, K, dtype, tanh, keep",
    [
        (72, 384, 192, torch.bfloat16, False, False),
        (136, 256, 128, torch.float16, True, False),
        (40, 128, 64, torch.bfloat16, False, True),
        (40, 256, 64, torch.float16, True, True),
    ],
)
def test_linear_gelu_hopper__matches_float64_interpreted(M, N, K, dtype, tanh, keep):
    import jax.numpy as jnp

    from vitkernels.ops.linear_gelu.pallas_hopper_kernel import GeluLinearBackward, LinearGelu

    array = lambda x: jnp.asarray(x.float().numpy(), str(dtype).removeprefix("torch."))  # noqa: E731
    tensor = lambda a: torch.tensor(a.astype("float32").tolist())  # noqa: E731
    x, weight = torch.randn(M, K).to(dtype), (torch.randn(N, K) * K**-0.5).to(dtype)
    bias = torch.randn(N)
    fields = M, N, K, str(dtype).removeprefix("torch."), 1
    forward, backward = (partial(kind, *fields, interpret=True) for kind in (LinearGelu, GeluLinearBackward))

    saved, act = map(tensor, forward(True, tanh, keep)(array(x), array(weight), jnp.asarray(bias.numpy())))
    pre = F.linear(x.double(), weight.double(), bias.double())
    exact_act, exact_slope = gelu_and_slope(pre, tanh)
    assert error(saved, exact_slope if keep else pre) < TOLERANCE[dtype]
    assert error(act, exact_act) < TOLERANCE[dtype]

    dpre, sums = map(tensor, backward(tanh, keep)(array(x), array(weight.mT), array(saved)))
    exact = x.double() @ weight.double().mT * (saved.double() if keep else gelu_and_slope(saved, tanh)[1])
    assert error(dpre, exact) < TOLERANCE[dtype]
    assert error(sums.sum(0), exact.sum(0)) < TOLERANCE[dtype]


@needs_new_jax
@pytest.mark.parametrize("N, K, dtype", [(3072, 768, "bfloat16"), (5120, 1280, "float16")])
def test_linear_gelu_hopper__lowers_for_the_gpu(N, K, dtype):
    """Mosaic GPU checks layouts, copies and shared memory on any machine; only ptxas needs a GPU machine."""
    from vitkernels.bridge.mosaic_gpu import mosaic_module
    from vitkernels.ops.linear_gelu.pallas_hopper_kernel import GeluLinearBackward, LinearGelu

    for keep in (False, True):
        fields = 25216, N, K, dtype, 66
        for product in (LinearGelu(*fields, True, False, keep), GeluLinearBackward(*fields, False, keep)):
            assert mosaic_module(product, product.inputs()).startswith(b"ML")  # MLIR bytecode


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(linear_hopper._reason is not None, reason=str(linear_hopper._reason)),
]


def on_hopper(test):
    for mark in gpu:
        test = mark(test)
    return test


def draw(M, K, N, dtype):
    shapes = (M, K), (N, K), (N,), (K, N)
    leaves = [torch.randn(shape, device="cuda") * (shape[-1] ** -0.5 if shape != (M, K) else 1) for shape in shapes]
    return [x.to(dtype).requires_grad_() for x in leaves]


def half_of_square(out):
    """Return a scalar whose gradient is the output.

    The backward pass then does not start with a product: PyTorch warns if its thread starts with cuBLAS.
    """
    return out.double().square().sum() / 2


def results(leaves, approximate="none", **settings):
    x, weight1, bias1, weight2 = leaves
    out = mlp(x, weight1, bias1, weight2, approximate=approximate, **settings)
    return out, *torch.autograd.grad(half_of_square(out), leaves)


@on_hopper
@pytest.mark.parametrize(
    "M, K, N, dtype, approximate",
    [
        (8, 64, 128, torch.float16, "tanh"),
        (25216, 192, 768, torch.bfloat16, "none"),
        (1576, 1024, 4096, torch.bfloat16, "tanh"),
        (33000, 768, 3072, torch.float16, "none"),
    ],
)
def test_linear_gelu_hopper__matches_float64(M, K, N, dtype, approximate):
    leaves = draw(M, K, N, dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    out = F.linear(F.gelu(F.linear(*wide[:3]), approximate=approximate), wide[3])
    exact = out, *torch.autograd.grad(half_of_square(out), wide)
    for keep in (False, True):
        found = results(leaves, approximate, keep_activation=keep, backend="pallas_hopper")
        for name, x, y in zip(("out", "dx", "dweight1", "dbias1", "dweight2"), found, exact, strict=True):
            # Two roundings: of the hidden tensor, and of the output, which is also the incoming gradient.
            assert error(x, y) < 2 * TOLERANCE[dtype], (name, keep)


@on_hopper
def test_linear_gelu_hopper__is_bitwise_reproducible():
    leaves = draw(4096, 768, 3072, torch.bfloat16)
    for x, y in zip(*(results(leaves, backend="pallas_hopper") for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@on_hopper
def test_linear_gelu_hopper__runs_in_cuda_graphs_and_on_unaligned_tensors():
    x, weight, bias, _ = (t.detach() for t in draw(128, 128, 256, torch.bfloat16))
    shifted = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view_as(x).copy_(x)
    expected = linear_gelu(shifted, weight, bias, backend="pallas_hopper")
    assert torch.equal(expected, linear_gelu(x, weight, bias, backend="pallas_hopper"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = linear_gelu(x, weight, bias, backend="pallas_hopper")
    x.neg_()
    graph.replay()
    assert torch.equal(out, linear_gelu(x, weight, bias, backend="pallas_hopper"))


@on_hopper
def test_linear_gelu_hopper__compiles_to_one_graph():
    leaves = draw(256, 128, 512, torch.bfloat16)
    run = lambda *leaves: mlp(*leaves, keep_activation=True, backend="pallas_hopper") * 2  # noqa: E731
    compiled = torch.compile(run, fullgraph=True)
    ours = compiled(*leaves)
    torch.testing.assert_close(ours, run(*leaves))
    grads = torch.autograd.grad(ours.sum(), leaves)
    assert all(g.isfinite().all() for g in grads)
