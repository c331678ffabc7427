"""Conformance suite of cross_entropy: every backend against float64, for class indices and distributions."""

import pytest
import torch
from backend_devices import each_backend_and_device
from expecting import error
from refused import skip_if_refused
from torch.nn import functional as F

pytest.importorskip("triton")

from vitkernels.ops import cross_entropy
from vitkernels.ops.cross_entropy import BACKENDS

# Relative to the gradient's norm: float32 sums of up to 21843 terms; for others the rounding of the gradient itself.
TOLERANCE = {torch.float32: 3e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float64: 1e-14}

pytestmark = [
    pytest.mark.usefixtures("poisoned_memory"),
    each_backend_and_device(BACKENDS),
]


def check(backend, logits, targets, **settings):
    logits = logits.requires_grad_()
    loss = cross_entropy(logits, targets, backend=backend, **settings)
    (gradient,) = torch.autograd.grad(loss * 1.7, logits)
    copy = logits.detach().double().requires_grad_()
    exact = F.cross_entropy(copy, targets.double() if targets.is_floating_point() else targets, **settings)
    (exact_gradient,) = torch.autograd.grad(exact * 1.7, copy)
    assert loss.dtype == (torch.float64 if logits.dtype == torch.float64 else torch.float32) and loss.ndim == 0
    assert loss.item() == pytest.approx(exact.item(), rel=3e-5, abs=1e-6)  # sums of the same terms
    assert gradient.dtype == logits.dtype
    assert (gradient.double() - exact_gradient).norm() / exact_gradient.norm() < TOLERANCE[logits.dtype]


def soft_targets(B, C, device):
    return torch.softmax(torch.randn(B, C, device=device) * 3, 1)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("B, C", [(5, 10), (3, 1000), (2, 1), (2, 21843)])
def test_cross_entropy__matches_float64_for_class_indices(backend, device, B, C, label_smoothing):
    if C == 1:  # the gradient is 0, so a relative error is undefined
        assert cross_entropy(torch.randn(B, C, device=device), torch.zeros(B, dtype=torch.long, device=device)) == 0
        return
    targets = torch.randint(0, C, (B,), device=device)
    check(backend, torch.randn(B, C, device=device) * 4, targets, label_smoothing=label_smoothing)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("B, C", [(5, 10), (3, 1001)])
def test_cross_entropy__matches_float64_for_distributions(backend, device, B, C, label_smoothing):
    targets = soft_targets(B, C, device)
    check(backend, torch.randn(B, C, device=device) * 4, targets, label_smoothing=label_smoothing)
    check(backend, torch.randn(B, C, device=device) * 4, targets * 0.6, label_smoothing=label_smoothing)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_cross_entropy__excludes_ignored_rows(backend, device, ignore_index, label_smoothing):
    targets = torch.tensor([1, ignore_index, 3, ignore_index, 9], device=device)
    settings = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    check(backend, torch.randn(5, 10, device=device), targets, **settings)
    logits = torch.randn(5, 10, device=device, requires_grad=True)
    (gradient,) = torch.autograd.grad(cross_entropy(logits, targets, backend=backend, **settings), logits)
    assert torch.count_nonzero(gradient[targets == ignore_index]) == 0
    assert cross_entropy(logits, torch.full_like(targets, ignore_index), backend=backend, **settings).isnan()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("soft", [False, True])
def test_cross_entropy__matches_float64_for_each_dtype(backend, device, dtype, soft):
    logits = torch.randn(6, 100, device=device).to(dtype)
    targets = soft_targets(6, 100, device) if soft else torch.randint(0, 100, (6,), device=device)
    refusing = {"triton": (torch.float64,), "pallas_tpu": (torch.float64, torch.float16)}
    args = logits, targets, 0.0, -100
    may_refuse = dtype in refusing.get(backend, ())
    skip_if_refused(BACKENDS, backend, args, lambda: cross_entropy(logits, targets, backend=backend), may_refuse)
    check(backend, logits, targets.double() if soft and dtype == torch.float64 else targets, label_smoothing=0.1)


def test_cross_entropy__returns_float32_under_autocast(backend, device):
    with torch.autocast(device, torch.bfloat16):
        check(backend, torch.randn(3, 10, device=device).bfloat16(), torch.tensor([1, 2, 3], device=device))


def test_cross_entropy__handles_large_logits_and_int32_indices(backend, device):
    logits = torch.randn(4, 50, device=device) * 1000
    check(backend, logits, torch.randint(0, 50, (4,), device=device, dtype=torch.int32).long())
    int32 = torch.randint(0, 50, (4,), device=device, dtype=torch.int32)
    assert cross_entropy(logits, int32, backend=backend) == cross_entropy(logits, int32.long(), backend=backend)


def test_cross_entropy__reads_any_strides(backend, device):
    targets = torch.randint(0, 30, (4,), device=device)
    check(backend, torch.randn(30, 4, device=device).T, targets)
    check(backend, torch.randn(4, 60, device=device)[:, 7:37], targets)
    check(backend, torch.randn(4, 30, device=device), soft_targets(30, 4, device).T)


def test_cross_entropy__gives_equal_gradients_when_retained(backend, device):
    logits = torch.randn(4, 30, device=device, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1, 2, 3], device=device), backend=backend)
    first, second = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_cross_entropy__runs_under_no_grad(backend, device):
    logits, targets = torch.randn(4, 30, device=device), torch.tensor([0, 1, 2, 3], device=device)
    with torch.no_grad():
        loss = cross_entropy(logits.requires_grad_(), targets, backend=backend)
    assert not loss.requires_grad
    assert loss.item() == pytest.approx(F.cross_entropy(logits, targets).item(), rel=2e-6)


def test_cross_entropy__compiles_to_one_graph(backend, device):
    if backend == "reference":
        pytest.skip("plain PyTorch")
    torch._dynamo.reset()
    logits = torch.randn(4, 30, device=device, requires_grad=True)
    targets = torch.tensor([0, -100, 2, 3], device=device)

    def loss(logits):
        return cross_entropy(logits * 2, targets, 0.1, backend=backend) * 3

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager" if device == "cpu" else "inductor")
    torch.testing.assert_close(compiled(logits), loss(logits))
    grads = [torch.autograd.grad(function(logits), logits)[0] for function in (compiled, loss)]
    torch.testing.assert_close(*grads)


def test_cross_entropy__refuses_invalid_arguments(backend, device):
    logits = torch.randn(4, 30, device=device)
    with error("ops.cross_entropy.shape", argument="targets", expected=(4,)):
        cross_entropy(logits, torch.zeros(3, dtype=torch.long, device=device), backend=backend)
    with error("ops.cross_entropy.label_smoothing", label_smoothing=1.5):
        cross_entropy(logits, torch.zeros(4, dtype=torch.long, device=device), 1.5, backend=backend)
    with error("ops.cross_entropy.dtype", argument="targets"):
        cross_entropy(logits, torch.zeros(4, dtype=torch.bool, device=device), backend=backend)
    with error("ops.cross_entropy.shape", argument="logits"):
        cross_entropy(logits[0], torch.zeros(4, dtype=torch.long, device=device), backend=backend)
    with error("ops.cross_entropy.dtype", argument="logits"):
        cross_entropy(logits.long(), torch.zeros(4, dtype=torch.long, device=device), backend=backend)
    with error("ops.cross_entropy.device", argument="targets"):
        cross_entropy(logits, torch.zeros(4, dtype=torch.long, device="meta"), backend=backend)


def test_triton__returns_nan_for_invalid_indices_and_refuses_target_gradients(backend, device):
    logits = torch.randn(4, 30, device=device)
    if backend == "triton":
        number = torch.tensor([0, 1, 30, 2], device=device)
        assert cross_entropy(logits, number, backend=backend).isnan()
        with error("registry.unsupported", backend="triton"):
            cross_entropy(logits, soft_targets(4, 30, device).requires_grad_(), backend=backend)
