"""The training loss of a batch, with and without rows that hold no sample."""

import pytest
import torch
from expecting import error
from timm.loss import BinaryCrossEntropy
from torch.nn import functional as F

from vitkernels.data import IGNORE
from vitkernels.training.loss import build_bce, build_loss

BACKENDS = ["eager", "auto", "reference", "triton"]


def loss_and_gradient(backend, logits, targets, smoothing=0.1):
    if backend == "triton":
        pytest.importorskip("triton", reason="no Triton on this platform")
    leaf = logits.clone().requires_grad_()
    loss = build_loss(backend, smoothing)(leaf, targets)
    (gradient,) = torch.autograd.grad(loss, leaf)
    return loss.detach(), gradient


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("soft", [False, True])
def test_loss__equals_torch(backend, soft):
    logits = torch.randn(5, 7)
    targets = torch.rand(5, 7).softmax(1) if soft else torch.tensor([0, 3, -100, 6, 1])
    exact = logits.double().requires_grad_()
    loss = F.cross_entropy(exact, targets.double() if soft else targets, label_smoothing=0.1)
    found, gradient = loss_and_gradient(backend, logits, targets)
    torch.testing.assert_close(found.double(), loss.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(gradient.double(), torch.autograd.grad(loss, exact)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("targets", [torch.full((3,), -100), torch.zeros(3, 7)])
def test_batch_without_samples__has_zero_loss_and_gradient(backend, targets):
    loss, gradient = loss_and_gradient(backend, torch.randn(3, 7), targets)
    assert loss == 0 and not gradient.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_without_sample__gets_no_gradient(backend):
    targets = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]])
    _, gradient = loss_and_gradient(backend, torch.randn(2, 3), targets)
    assert gradient[0].any() and not gradient[1].any()


def test_unknown_backend__is_refused_when_the_loss_is_built():
    with error("unknown_name", name="tritn"):
        build_loss("tritn")


@pytest.mark.parametrize("kind", ["classes", "mixed", "labels"])
def test_bce__matches_timm_and_ignores_rows_without_a_sample(kind):
    logits = torch.randn(6, 4)
    targets = {
        "classes": torch.tensor([0, 3, 1, 2, 2, 0]),
        "mixed": torch.rand(6, 4) + 0.1,
        "labels": (torch.rand(6, 4) > 0.5).float(),
    }[kind]
    expected = BinaryCrossEntropy(smoothing=0.1)(logits[:4], targets[:4])
    targets[4:] = 0 if kind == "mixed" else IGNORE
    loss = build_bce(0.1, targets="labels" if kind == "labels" else "classes")
    torch.testing.assert_close(loss(logits, targets), expected)
    assert loss(logits[4:], targets[4:]) == 0


def test_bce__threshold_matches_timm():
    logits, targets = torch.randn(3, 4), torch.rand(3, 4)
    expected = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.3)(logits, targets)
    torch.testing.assert_close(build_bce(threshold=0.3)(logits, targets), expected)


def test_cross_entropy__of_distributions_ignores_negative_rows():
    logits, targets = torch.randn(4, 3), torch.rand(4, 3).softmax(1)
    zeros, negative = targets.clone(), targets.clone()
    zeros[3], negative[3] = 0, IGNORE
    assert torch.equal(build_loss(targets="distributions")(logits, negative), build_loss()(logits, zeros))
