"""The changes that `sdpa` makes to a call before it reaches PyTorch's kernels."""

import pytest
import torch

from vitkernels import attention
from vitkernels.attention.sdpa import requiring_gradient
from vitkernels.testing.attention_reference import TOLERANCE, draw, reference, relative_error


@pytest.mark.parametrize("shape", [(2, 1, 5, 6), (6,)])
def test_requiring_gradient__makes_q_require_one_if_only_the_bias_does(shape):
    q, k, v = (x.detach() for x in draw("cpu", 2, 3, 5, 8, M=6))
    bias = torch.randn(shape)
    bias[..., 0] = float("-inf")
    bias.requires_grad_()
    tied = requiring_gradient(q, k, v, bias)
    assert tied.requires_grad and torch.equal(tied, q)
    (gradient,) = torch.autograd.grad(tied.sum(), bias)
    assert not gradient.any()
    for leaf in (q, k, v):
        leaf.requires_grad_()
        assert requiring_gradient(q, k, v, bias) is q
        leaf.requires_grad_(False)


@pytest.mark.parametrize("N, M", [(1, 33), (50, 70), (7, 7), (70, 50), (0, 3)])
def test_causal__keys_after_the_last_query_get_zero_gradients(N, M):
    leaves = draw("cpu", 2, 2, N, 16, M=M)
    out = attention.get("sdpa")(*leaves, is_causal=True)
    copies = [x.detach().double().requires_grad_() for x in leaves]
    exact = reference(*copies, is_causal=True)
    do = torch.randn_like(out)
    for found, wanted in zip(
        (out, *torch.autograd.grad(out, leaves, do)),
        (exact, *torch.autograd.grad(exact, copies, do.double())),
        strict=True,
    ):
        assert found.shape == wanted.shape and relative_error(found, wanted) < TOLERANCE[torch.float32]
    dk = torch.autograd.grad(attention.get("sdpa")(*leaves, is_causal=True), leaves[1], do)[0]
    assert not dk[:, :, N:].any()
