"""Conformance suite of linear_gelu and mlp: every backend against float64, with all gradients."""

import pytest
import torch
from expecting import error
from refused import skip_if_refused
from torch.nn import functional as F

pytest.importorskip("triton")

from vitkernels.ops import linear_gelu, mlp
from vitkernels.ops.linear_gelu import BACKENDS
from vitkernels.ops.mlp import BACKENDS as MLP_BACKENDS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# Relative to the norm. float32: sums of up to a few hundred products. 16 bits: inputs are exact; the pre-activation,
# the result and the gradients between products are rounded once each.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}

pytestmark = [pytest.mark.usefixtures("poisoned_memory"), pytest.mark.parametrize("device", DEVICES)]
MODEL_SIZES = [(1000, 768, 3072), (394, 192, 768), (130, 1280, 5120), (50, 80, 208)]  # tokens, width, hidden features
each_backend = pytest.mark.parametrize("backend", BACKENDS.names())
each_mlp_backend = pytest.mark.parametrize("backend", MLP_BACKENDS.names())


def draw(device, M=40, K=32, N=48, O=None, dtype=torch.float32, bias_dtype=None):
    """Return x, weight and bias, and with O the second weight and bias."""
    shapes = [(2, M // 2, K) if M % 2 == 0 else (M, K), (N, K), (N,)]
    shapes += [] if O is None else [(O, N), (O,)]
    leaves = []
    for shape in shapes:
        scale = shape[1] ** -0.5 if len(shape) == 2 and shape[0] != M else 1.0
        x = (torch.randn(shape, device=device) * scale).to(bias_dtype or dtype if len(shape) == 1 else dtype)
        leaves.append(x.requires_grad_())
    return leaves


def taken(op, backends, backend, leaves, tanh):
    args = (*leaves, tanh) if op is linear_gelu else (*leaves, tanh, False)
    approximate = "tanh" if tanh else "none"
    skip_if_refused(backends, backend, args, lambda: op(*leaves, approximate=approximate, backend=backend))


def reference(x, weight1, bias1=None, weight2=None, bias2=None, approximate="none"):
    hidden = F.gelu(F.linear(x, weight1, bias1), approximate=approximate)
    return hidden if weight2 is None else F.linear(hidden, weight2, bias2)


def check(op, leaves, approximate="none", backend="auto", **settings):
    out = op(*leaves, approximate=approximate, backend=backend, **settings)
    dout = torch.randn_like(out)
    grads = torch.autograd.grad(out, leaves, dout)
    copies = [x.detach().double().requires_grad_() for x in leaves]
    exact = reference(*copies, approximate=approximate)
    exact_grads = torch.autograd.grad(exact, copies, dout.double())
    assert out.shape == exact.shape and out.dtype == leaves[0].dtype
    names = ("out", "dx", "dweight1", "dbias1", "dweight2", "dbias2")
    for name, x, y in zip(names, (out, *grads), (exact, *exact_grads), strict=False):
        assert (x.double() - y).norm() / y.norm() < TOLERANCE[out.dtype], name
    for x, grad in zip(leaves, grads, strict=True):
        assert grad.dtype == x.dtype and grad.shape == x.shape


@each_backend
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("M, K, N", [(40, 32, 48), (1, 16, 16), (33, 48, 80), (7, 5, 3), (200, 16, 16)])
def test_linear_gelu__matches_float64(device, backend, approximate, M, K, N):
    leaves = draw(device, M, K, N)
    taken(linear_gelu, BACKENDS, backend, leaves, approximate == "tanh")
    check(linear_gelu, leaves, approximate, backend)


@each_mlp_backend
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("M, K, N, O", [(40, 32, 80, 48), (33, 16, 48, 16), (7, 5, 9, 3), (200, 16, 32, 16)])
def test_mlp__matches_float64(device, backend, approximate, M, K, N, O):
    leaves = draw(device, M, K, N, O)
    taken(mlp, MLP_BACKENDS, backend, leaves, approximate == "tanh")
    check(mlp, leaves, approximate, backend)
    check(mlp, leaves, approximate, backend, keep_activation=True)


@pytest.mark.gpu
@each_mlp_backend
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("M, K, N, O", [(M, K, N, K if K > 100 else 48) for M, K, N in MODEL_SIZES])
def test_mlp__matches_float64_at_model_sizes(device, backend, approximate, M, K, N, O):
    if device == "cpu":
        pytest.skip("a GPU's sizes")
    leaves = draw(device, M, K, N, O, torch.bfloat16, torch.float32)
    taken(mlp, MLP_BACKENDS, backend, leaves, approximate == "tanh")
    check(mlp, leaves, approximate, backend)
    check(mlp, leaves, approximate, backend, keep_activation=True)


@pytest.mark.gpu
@each_backend
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("M, K, N", MODEL_SIZES)
def test_linear_gelu__matches_float64_at_model_sizes(device, backend, approximate, M, K, N):
    if device == "cpu":
        pytest.skip("a GPU's sizes")
    leaves = draw(device, M, K, N, dtype=torch.bfloat16, bias_dtype=torch.float32)
    taken(linear_gelu, BACKENDS, backend, leaves, approximate == "tanh")
    check(linear_gelu, leaves, approximate, backend)


@each_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M, bias_dtype", [(40, None), (40, torch.float32), (200, torch.float32)])
def test_linear_gelu__matches_float64_for_each_dtype(device, backend, dtype, M, bias_dtype):
    leaves = draw(device, M, dtype=dtype, bias_dtype=bias_dtype)
    taken(linear_gelu, BACKENDS, backend, leaves, False)
    check(linear_gelu, leaves, backend=backend)


@each_mlp_backend
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("M", [20, 200])
def test_mlp__matches_float64_for_each_dtype(device, backend, M, dtype):
    leaves = draw(device, M, O=32, dtype=dtype, bias_dtype=torch.float32)
    taken(mlp, MLP_BACKENDS, backend, leaves, False)
    check(mlp, leaves, backend=backend)
    check(mlp, leaves, backend=backend, keep_activation=True)


@each_mlp_backend
def test_mlp__computes_float64_exactly_or_refuses(device, backend):
    leaves = draw(device, O=16, dtype=torch.float64)
    taken(mlp, MLP_BACKENDS, backend, leaves, False)
    check(mlp, leaves, backend=backend)


@each_mlp_backend
def test_mlp__computes_in_autocasts_dtype(device, backend):
    leaves = draw(device, 20, O=16)
    halves = [x.detach().bfloat16().requires_grad_() for x in leaves]
    taken(mlp, MLP_BACKENDS, backend, halves, False)
    with torch.autocast(device, torch.bfloat16):
        out = mlp(*leaves, backend=backend)
        hidden = linear_gelu(*leaves[:3])
    assert out.dtype == hidden.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.float().sum() + hidden.float().sum(), leaves)
    assert all(grad.dtype == torch.float32 for grad in grads)
    exact = reference(*(x.double() for x in leaves))
    assert (out.double() - exact).norm() / exact.norm() < 2 * TOLERANCE[torch.bfloat16]  # autocast also rounds inputs


@each_mlp_backend
def test_mlp__keeps_weight_gradients_in_float32_under_autocast(device, backend):
    x, *parameters = draw(device, 512, O=48)
    x = x.detach().bfloat16()
    halves = [p.detach().bfloat16() for p in parameters]
    taken(mlp, MLP_BACKENDS, backend, [x, *halves], False)
    first, one = parameters[:2], torch.eye(48, device=device)
    with torch.autocast(device, torch.bfloat16):
        hidden = mlp(x, *first, one, 0 * one[0], keep_activation=True, backend=backend)
        out = mlp(x, *parameters, keep_activation=True, backend=backend)
    dout = torch.ones_like(out) + torch.arange(48, device=device).to(out.dtype) / 64
    (dweight2,) = torch.autograd.grad((out.double() * dout.double()).sum(), parameters[2:3])
    exact = dout.double().view(-1, 48).mT @ hidden.detach().double().view(-1, 48)
    off = ((dweight2.double() - exact).norm() / exact.norm()).item()
    # The hidden tensor is exact, because an identity reproduces its bits; only the sum and its rounding remain.
    expected = 5e-4 < off < 4e-3 if backend == "reference" else off < 2e-6
    assert expected, f"dweight2 is off by {off:.1e}; rounding it to bfloat16 before float32 gives 2e-3"


@each_mlp_backend
def test_mlp__runs_without_biases(device, backend):
    x, weight1, bias1, weight2, _ = leaves = draw(device, 20, O=16, dtype=torch.float16)
    taken(mlp, MLP_BACKENDS, backend, leaves, False)
    check(mlp, [x, weight1, bias1, weight2], backend=backend)
    out = mlp(x, weight1, None, weight2, backend=backend)
    exact = reference(x.double(), weight1.double(), None, weight2.double())
    assert (out.double() - exact).norm() / exact.norm() < TOLERANCE[torch.float16]
    assert torch.autograd.grad(out.sum(), (x, weight2))[0].isfinite().all()


@each_mlp_backend
def test_mlp__reads_any_strides_and_computes_only_required_gradients(device, backend):
    x, weight1, bias1, weight2, bias2 = draw(device, 20, O=16, dtype=torch.float16)
    taken(mlp, MLP_BACKENDS, backend, (x, weight1, bias1, weight2, bias2), False)
    transposed = [t.detach().mT.contiguous().mT for t in (x, weight1, weight2)]
    x, weight1, weight2 = (t.requires_grad_() for t in transposed)
    check(mlp, [x, weight1, bias1, weight2, bias2], backend=backend)
    out = mlp(x.detach(), weight1.detach(), bias1, weight2, None, backend=backend)
    found = torch.autograd.grad(out.sum(), (bias1, weight2))  # the incoming gradient is one number, expanded
    copies = [t.detach().double().requires_grad_() for t in (bias1, weight2)]
    exact = reference(x.double(), weight1.double(), copies[0], copies[1])
    for ours, theirs in zip(found, torch.autograd.grad(exact.sum(), copies), strict=True):
        assert (ours.double() - theirs).norm() / theirs.norm() < TOLERANCE[torch.float16]


@each_mlp_backend
def test_mlp__accepts_an_empty_batch(device, backend):
    leaves = draw(device, O=16, dtype=torch.float16)
    leaves[0] = leaves[0].detach()[:, :0].requires_grad_()
    taken(mlp, MLP_BACKENDS, backend, leaves, False)
    out = mlp(*leaves, backend=backend)
    assert out.shape == (2, 0, 16)
    assert all(torch.count_nonzero(g) == 0 for g in torch.autograd.grad(out.sum(), leaves))


@each_mlp_backend
def test_mlp__is_bitwise_reproducible(device, backend):
    leaves = draw(device, 40, O=16, dtype=torch.float16)
    taken(mlp, MLP_BACKENDS, backend, leaves, False)

    def once():
        out = mlp(*leaves, backend=backend)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


@pytest.mark.parametrize("backend", ["passes", "triton"])
def test_linear_gelu__compiles_to_one_graph_with_mlp(device, backend):
    torch._dynamo.reset()
    leaves = draw(device, 20, 16, 16, 16, dtype=torch.float32)
    taken(mlp, MLP_BACKENDS, backend, leaves, False)

    def model(x, weight1, bias1, weight2, bias2):
        x = x + mlp(x, weight1, bias1, weight2, bias2, backend=backend)
        return linear_gelu(x, weight1, bias1, "tanh", backend=backend) * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    outs = [function(*leaves) for function in (model, compiled)]
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)  # different kernels sum in a different order
    grads = [torch.autograd.grad(out.sum(), leaves) for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


def test_linear_gelu__is_accurate_in_both_tails(device):
    """In both tails nothing overflows, and tiny values are accurate to float32's absolute precision."""
    x = torch.tensor([-1e4, -40.0, -12.0, -6.0, -3.0, -1e-3, 0.0, 1e-3, 3.0, 6.0, 40.0, 1e4], device=device)
    for approximate in ("none", "tanh"):
        column = x[:, None].clone().requires_grad_()
        out = linear_gelu(column, torch.ones(1, 1, device=device), approximate=approximate, backend="passes")
        (slope,) = torch.autograd.grad(out.sum(), column)
        wide = x.double().requires_grad_()
        exact = F.gelu(wide, approximate=approximate)
        (exact_slope,) = torch.autograd.grad(exact.sum(), wide)
        torch.testing.assert_close(out[:, 0], exact.float(), rtol=3e-7, atol=5e-7)
        torch.testing.assert_close(slope[:, 0], exact_slope.float(), rtol=1e-6, atol=1e-6)


def test_linear_gelu__passes_opcheck(device):
    """Check schemas, fake outputs and registered gradients."""
    x, weight1, bias1, weight2, bias2 = draw(device, 6, 16, 16, 16)
    ops = torch.ops.vitkernels
    checks = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(ops.linear_gelu, (x, weight1, bias1, False, False, "passes"), test_utils=checks)
    rounded1, rounded2 = weight1.detach().clone(), weight2.detach().clone()
    torch.library.opcheck(
        ops.mlp, (x, weight1, rounded1, bias1, weight2, rounded2, bias2, True, True, "passes"), test_utils=checks
    )
    dy, pre = torch.randn(6, 16, device=device), torch.randn(6, 16, device=device)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.gelu_backward_with_sums, (dy, pre, False), test_utils=checks)
    torch.library.opcheck(
        ops.linear_into_gelu_backward, (dy, weight2.detach(), pre, False, False, "passes"), test_utils=checks
    )


def test_linear_gelu__refuses_invalid_arguments(device):
    x, weight1, bias1, weight2, bias2 = draw(device, O=16)
    with error("ops.linear_gelu.approximate", approximate="erf"):
        linear_gelu(x, weight1, bias1, "erf")
    with error("ops.linear.shape", argument="weight", features=32):
        linear_gelu(x, weight2, bias2)
    with error("ops.linear.shape", argument="weight2", features=48):
        mlp(x, weight1, bias1, weight1)
    with error("ops.linear.shape", argument="bias2", expected=(16,)):
        mlp(x, weight1, bias1, weight2, bias1)
    with error("ops.linear.mixed_dtypes", argument="weight", dtype=torch.bfloat16, expected=torch.float32):
        linear_gelu(x, weight1.bfloat16(), bias1)
    for op in (linear_gelu, lambda x, weight, bias: mlp(x, weight, bias, weight2)):
        with error("ops.linear.shape", argument="x", shape=()):
            op(x.flatten()[0], weight1, bias1)
    with error("registry.unsupported", backend="passes"):
        linear_gelu(x[..., :0], weight1[:, :0], bias1, backend="passes")
    with error("unknown_name", name="hoper"):
        mlp(x, weight1, bias1, weight2, backend="hoper")
