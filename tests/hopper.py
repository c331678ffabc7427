"""Shared setup for the tests of Hopper kernels."""

import math
import os

import pytest
import torch

# In the interpreter, a kernel's warpgroups are XLA threads that wait for each other. XLA starts one per core, which
# deadlocks on a machine with two. JAX reads this when it initializes the CPU backend.
os.environ.setdefault("NPROC", "8")
jax = pytest.importorskip("jax")

needs_new_jax = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason=f"Mosaic GPU's interpreter needs jax 0.11 or newer, this is {jax.__version__}: pip install 'jax>=0.11' "
    "(on Python 3.12)",
)


def error(x, exact) -> float:
    """Return the error relative to the norm."""
    return ((x.double() - exact).norm() / exact.norm()).item()


def exact_attention(qkv_BN3HD, do_BNHD, scale, is_causal):
    """Return out (B, N, H, D), dqkv and log-sum-exp in log2 units, in float64."""
    leaf = qkv_BN3HD.double().requires_grad_()
    q, k, v = leaf.permute(2, 0, 3, 1, 4).unbind(0)
    scores = q @ k.mT * scale
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    out = (scores.softmax(-1) @ v).transpose(1, 2)
    (dqkv,) = torch.autograd.grad(out, leaf, do_BNHD.double())
    return out.detach(), dqkv, torch.logsumexp(scores, -1).detach() / math.log(2)
