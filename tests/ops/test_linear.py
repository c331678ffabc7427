"""Conformance suite of linear: every backend against float64, with all gradients."""

import pytest
import torch
from expecting import error
from refused import skip_if_refused
from torch.nn import functional as F

pytest.importorskip("triton")

from vitkernels.ops import linear
from vitkernels.ops.linear import BACKENDS
from vitkernels.ops.linear.gradients import column_sums, weight_gradient

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Relative to the norm: float32 sums of a few hundred products; inputs are exact, results rounded once.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 5e-4, torch.bfloat16: 4e-3, torch.float64: 1e-14}

pytestmark = [pytest.mark.parametrize("device", DEVICES)]
each_backend = pytest.mark.parametrize("backend", BACKENDS.names())


def draw(device, M=40, K=32, N=48, dtype=torch.float32, parameter_dtype=None):
    """Return x (2, M / 2, K), weight and bias."""
    x = torch.randn(2, M // 2, K, device=device).to(dtype)
    weight, bias = torch.randn(N, K, device=device) * K**-0.5, torch.randn(N, device=device)
    return [t.requires_grad_() for t in (x, *(p.to(parameter_dtype or dtype) for p in (weight, bias)))]


def relative_error(x, exact) -> float:
    return ((x.double() - exact).norm() / exact.norm()).item()


def gradients(out, leaves, dout):
    """Differentiate a scalar: PyTorch warns if a backward thread starts with cuBLAS."""
    return torch.autograd.grad((out.double() * dout.double()).sum(), leaves)


def in_float64(leaves, dout):
    copies = [x.detach().double().requires_grad_() for x in leaves]
    out = F.linear(*copies)
    return out, *gradients(out, copies, dout)


def taken(leaves, backend, is_qkv=False):
    args = [*leaves, None][:3]
    skip_if_refused(BACKENDS, backend, (*args, is_qkv), lambda: linear(*args, is_qkv=is_qkv, backend=backend))


def check(leaves, backend):
    taken(leaves, backend)
    out = linear(*leaves, backend=backend)
    dout = torch.randn_like(out)
    found = out, *gradients(out, leaves, dout)
    assert out.dtype == leaves[0].dtype
    for name, x, exact in zip(("out", "dx", "dweight", "dbias"), found, in_float64(leaves, dout), strict=False):
        assert x.shape == exact.shape and relative_error(x, exact) < TOLERANCE[x.dtype], name
    assert [x.dtype for x in found[1:]] == [x.dtype for x in leaves]


@each_backend
@pytest.mark.parametrize("M, K, N", [(40, 32, 48), (2, 16, 16), (66, 5, 3), (5000, 8, 33)])
def test_linear__matches_float64(device, backend, M, K, N):
    check(draw(device, M, K, N), backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("M, K, N", [(40, 32, 48), (40, 64, 128), (272, 192, 384)])
def test_linear__matches_float64_for_each_dtype(device, backend, dtype, M, K, N):
    check(draw(device, M, K, N, dtype), backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear__runs_without_bias_and_computes_only_required_gradients(device, backend, dtype):
    x, weight, bias = draw(device, K=64, N=128, dtype=dtype)
    check([x, weight], backend)
    (found,) = torch.autograd.grad(linear(x.detach(), weight.detach(), bias, backend=backend).sum(), bias)
    assert torch.equal(found, torch.full_like(found, 40.0))  # the incoming gradient is one number, expanded


def test_linear__keeps_weight_gradients_in_float32_under_autocast(device):
    """The purpose of the op: products of rounded inputs, summed and kept in float32."""
    x, weight, bias = draw(device, 512, 64, 128, torch.bfloat16, torch.float32)
    errors = {}
    for backend in BACKENDS.names():
        if BACKENDS.unsupported(backend, x, weight, bias, False):
            continue
        with torch.autocast(device, torch.bfloat16):
            out = linear(x, weight, bias, backend=backend)
        dout = torch.ones_like(out) + torch.arange(128, device=device).to(out.dtype) / 128
        dweight, dbias = gradients(out, (weight, bias), dout)
        assert out.dtype == torch.bfloat16 and dweight.dtype == dbias.dtype == torch.float32
        errors[backend] = relative_error(dweight, dout.double().view(-1, 128).mT @ x.detach().double().view(-1, 64))
    assert 5e-4 < errors.pop("reference") < 4e-3
    assert "triton" in errors and max(errors.values()) < 2e-6


@each_backend
def test_linear__returns_zero_gradient_for_the_keys_bias(device, backend):
    """The gradient of the keys' bias is zero up to rounding errors, because softmax ignores it."""
    x, weight, bias = draw(device, 34, N=96)
    taken([x, weight, bias], backend, is_qkv=True)

    def run(linear, x, weight, bias):
        q, k, v = linear(x, weight, bias).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v)

    out = run(lambda *leaves: linear(*leaves, is_qkv=True, backend=backend), x, weight, bias)
    dout = torch.randn_like(out)
    found = gradients(out, (x, weight, bias), dout)
    wide = [t.detach().double().requires_grad_() for t in (x, weight, bias)]
    exact = gradients(run(F.linear, *wide), wide, dout)
    assert exact[2][32:64].abs().max() < 1e-12
    for name, a, b in zip(("dx", "dweight", "dbias"), found, exact, strict=True):
        assert relative_error(a, b) < 2e-6, name
    if backend != "reference":
        assert torch.count_nonzero(found[2][32:64]) == 0 and torch.count_nonzero(found[2]) == 64


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear__accepts_an_empty_batch(device, backend, dtype):
    leaves = draw(device, 0, dtype=dtype, parameter_dtype=torch.float32)
    with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.bfloat16):
        taken(leaves, backend)
        out = linear(*leaves, backend=backend)
    assert out.shape == (2, 0, 48)
    assert all(torch.count_nonzero(g) == 0 for g in gradients(out, leaves, torch.ones_like(out)))


def test_linear__compiles_to_one_graph(device):
    torch._dynamo.reset()
    leaves = draw(device, parameter_dtype=torch.float32)

    def model(x, weight, bias):
        with torch.autocast(device, torch.bfloat16):
            return linear(x * 2, weight, bias, is_qkv=True, backend="triton").relu()

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    outs = [function(*leaves) for function in (model, compiled)]
    assert torch.equal(*outs)
    grads = [torch.autograd.grad(out.float().square().sum(), leaves) for out in outs]
    for plain, found in zip(*grads, strict=True):
        if device == "cpu":
            assert torch.equal(plain, found)
        else:  # Inductor rounds the loss' gradient elsewhere
            assert relative_error(found, plain.double()) < TOLERANCE[torch.bfloat16]


def test_linear__passes_opcheck(device):
    x, weight, bias = draw(device)
    ops, all_checks = torch.ops.vitkernels, ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.linear, (x, weight, weight.detach().clone(), bias, True, "triton"), test_utils=all_checks)
    dy, x = torch.randn(6, 16, device=device).bfloat16(), torch.randn(6, 8, device=device).bfloat16()
    for dtype in (torch.bfloat16, torch.float32):
        torch.library.opcheck(ops.weight_gradient, (dy, x, dtype), test_utils=all_checks[:2])
    torch.library.opcheck(ops.column_sums, (dy,), test_utils=all_checks[:2])


@pytest.mark.parametrize("M", [1, 63, 65, 2049, 5000])
def test_column_sums__match_float64_and_are_reproducible(device, M):
    x = torch.randn(M, 33, device=device)
    close = {"rtol": 1e-5, "atol": 1e-6 * M**0.5}
    torch.testing.assert_close(column_sums(x), x.double().sum(0).float(), **close)
    grouped = x.view(M, 3, 11)[:, ::2]  # non-adjacent groups, as the queries and values of a projection
    torch.testing.assert_close(column_sums(grouped), grouped.double().sum(0).float(), **close)
    assert torch.equal(column_sums(x), column_sums(x))


@pytest.mark.parametrize("N, K", [(24, 40), (5, 3)])
def test_weight_gradient__is_summed_in_float32(device, N, K):
    dy, x = (torch.randn(4096, n, device=device).bfloat16() for n in (N, K))
    exact = dy.double().mT @ x.double()
    with torch.autocast(device, torch.bfloat16):  # a backward pass may run inside autocast
        # Sequential float32 sums of 4096 products are off by about 2e-6; partial sums in bfloat16 by 1e-3.
        assert relative_error(weight_gradient(dy, x, torch.float32), exact) < 1e-5
        assert relative_error(weight_gradient(dy, x, torch.bfloat16), exact) < 4e-3


def test_linear__refuses_invalid_arguments(device):
    x, weight, bias = draw(device)
    with error("ops.linear.shape", argument="weight", features=32):
        linear(x, weight.mT, bias)
    with error("ops.linear.is_qkv", outputs=40):
        linear(x, weight[:40], None, is_qkv=True)
    with error("ops.linear.shape", argument="x", shape=()):
        linear(x[0, 0, 0], weight, bias)
    with error("ops.linear.shape", argument="bias", expected=(48,)):
        linear(x, weight, bias[:3])
    with error("ops.linear.type", argument="x", type="list"):
        linear([1.0], weight, bias)
    with error("unknown_name", name=None):
        linear(x, weight, bias, backend=None)
    with error("ops.linear.mixed_dtypes", argument="weight", dtype=torch.bfloat16):
        linear(x, weight.bfloat16(), None)
    with error("ops.linear.dtype", argument="weight"):
        linear(x, weight.int(), None)
    with error("ops.linear.device", argument="bias", device="meta"):
        linear(x, weight, bias.to("meta"))
    with error("registry.unsupported", backend="triton"):
        linear(x[..., :0], weight[:48, :0], None, backend="triton")
    with error("unknown_name", name="tritn"):
        linear(x, weight, bias, backend="tritn")
