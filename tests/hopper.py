"""Shared setup for the tests of Hopper kernels."""

import math
import os

import pytest
import torch

# In the interpreter, a kernel's warpgroups are XLA threads that wait for each other. XLA starts one per core, which
# deadlocks on a machine with two. With 8, a run that looked for races once did not end. JAX reads this when it
# initializes the CPU backend.
os.environ.setdefault("NPROC", "16")
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


def segments(*runs: tuple[int, int]) -> torch.Tensor:
    """Return the ids of consecutive segments, given as (id, tokens)."""
    return torch.cat([torch.full((tokens,), i) for i, tokens in runs])


# Ids of packed segments.
MIXED = segments((5, 1), (-3, 64), (900, 65), (7, 130))  # 1, 1, 2 and 4 chunks
TWO = segments((0, 197), (1, 63))
ODD = segments((4, 30), (0, 100), (1, 33), (2, 47), (3, 20))
RECURRING = segments((0, 70), (1, 120), (0, 40))
SHORT = segments(*((i, 10) for i in range(26)))  # would need more chunks than there are
