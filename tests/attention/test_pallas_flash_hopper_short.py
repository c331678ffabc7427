"""The kernels of `pallas_flash` on Hopper for up to 256 tokens, interpreted on the CPU.

test_pallas_flash_on_hopper.py and the conformance suite run them on a Hopper GPU; test_pallas_flash_hopper_ids.py
interprets them with ids and quads.
"""

import math

import pytest
import torch
from hopper import error, needs_new_jax

from vitkernels.testing.attention_reference import TOLERANCE, reference


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, blocks",
    [
        *((5, 130, 140, 2), (5, 197, 197, 2), (5, 140, 256, 2), (5, 250, 129, 2)),
        *((10, 50, 50, 1), (7, 100, 70, 1), (7, 40, 128, 1), (3, 50, 50, 1)),  # four or two heads at a time
    ],
)
def test_short_forward__interpreted(H, N, M, blocks):
    """Thread blocks, and groups of their warpgroups, process different numbers of heads.

    Both buffers are reused, except with three heads, of which one group gets none. Some last tiles are nearly empty.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward

    D = 64
    q, k, v = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M))
    scores = torch.einsum("bnhd,bmhd->bhnm", q.double(), k.double()) * 0.1
    exact = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v.double())

    array = lambda x: jnp.asarray(x.float().numpy(), "bfloat16")  # noqa: E731
    forward = ShortForward(1, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), None, True, blocks)
    out, lse = (torch.tensor(x.astype("float32").tolist()) for x in forward(*map(array, (q, k, v))))
    assert error(out, exact) < TOLERANCE[torch.bfloat16]
    assert (lse[:, :, :N] - scores.logsumexp(-1) / math.log(2)).abs().max() < 1e-5  # as above


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "H, N, M, shift",
    [
        *((3, 130, 140, 0), (2, 172, 140, -140), (3, 197, 197, 0), (2, 256, 256, 0)),
        *((2, 150, 197, 0), (2, 230, 130, 0), (5, 100, 70, -140), (6, 50, 50, 0), (3, 40, 250, 0), (3, 200, 40, 0)),
        (5, 100, 50, 0),
    ],
)
def test_short_backward__interpreted(H, N, M, shift):
    """Run the heads in sequence in one thread block, so that every buffer is reused.

    shift: offset of all scores. Softmax is invariant to it, but exp2 of the padding beyond the last key is not.
    """
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward

    class OneBlock(ShortBackward):
        blocks = 1

    D = 64
    q, k, v, do = (torch.randn(1, n, H, D).bfloat16() for n in (N, M, M, N))
    if shift:
        q[..., 0], k[..., 0] = 8, shift / 0.8
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].mT * 0.1
    out = (scores.softmax(-1) @ leaves[2]).transpose(1, 2)
    exact = torch.autograd.grad(out, leaves, do.double())
    lse = torch.zeros(1, H, 256)
    lse[:, :, :N] = scores.logsumexp(-1) / math.log(2)

    array = lambda x: jnp.asarray(x.detach().float().numpy(), "bfloat16")  # noqa: E731
    backward = OneBlock(1, H, N, M, D, "bfloat16", 0.1, False, H, (0, 0, 0), None, True)
    found = backward(*map(array, (q, k, v, out, do)), jnp.asarray(lse.detach().numpy()))
    for name, x, y in zip(("dq", "dk", "dv"), found, exact, strict=True):
        x = torch.tensor(x.astype("float32").tolist()).transpose(1, 2)
        # Skip the shifted column: in dq it is a sum of large numbers that cancel.
        assert x.isfinite().all() and error(x[..., 1:], y[..., 1:]) < TOLERANCE[torch.bfloat16], name


@needs_new_jax
def test_short_backward__with_large_gradients_in_float16__interpreted():
    """Rows past the last query have weights, and zeros as queries: an infinite dS there would be NaN in dk."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward

    N, M, D = 10, 64, 64
    q, k, v, do = (torch.randn(1, n, 1, D) for n in (N, M, M, N))
    v, do = 300 + v, 400 + do  # rowsum(dO O) / M exceeds the largest number of float16
    scores = q[0, :, 0] @ k[0, :, 0].T * 0.1
    out = (scores.softmax(-1) @ v[0, :, 0])[None, :, None]
    lse = torch.full((1, 1, 64), math.log2(M))  # as the forward kernel returns it for scores of 0
    lse[0, 0, :N] = scores.logsumexp(-1) / math.log(2)

    array = lambda x: jnp.asarray(x.numpy(), "float16")  # noqa: E731
    backward = ShortBackward(1, 1, N, M, D, "float16", 0.1, False, 1, (0, 0, 0), None, True)
    _, dk, _ = backward(*map(array, (q, k, v, out, do)), jnp.asarray(lse.numpy()))
    assert jnp.isfinite(dk).all()


@pytest.mark.usefixtures("detects_races")
@pytest.mark.slow
@needs_new_jax
@pytest.mark.parametrize(
    "B, H, shape, blocks, N, M, scale, of_bias, hides_keys",
    [
        (2, 2, (1, 2), 2, 130, 140, 0.125, torch.bfloat16, False),
        (2, 2, (2, 1), 2, 197, 135, 0.1, torch.float32, False),
        (2, 2, (1, 2), 2, 140, 230, 0.125, torch.float32, True),
        # Four or two heads at a time.
        (1, 10, (1, 10), 1, 49, 49, 0.125, torch.bfloat16, False),
        (1, 7, (1, 7), 1, 49, 100, 0.125, torch.float32, False),
        (2, 4, (2, 1), 1, 100, 60, 0.125, torch.float32, True),
    ],
)
def test_short_kernels__with_a_bias__interpreted(B, H, shape, blocks, N, M, scale, of_bias, hides_keys):
    """Each warpgroup processes two or more heads; rows of the bias are -inf or absorb their scores."""
    import jax.numpy as jnp

    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias
    from vitkernels.attention.pallas_flash.hopper.bias_groups import summed, transposed
    from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
    from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
    from vitkernels.attention.pallas_flash.hopper.token_ids import given as given_ids
    from vitkernels.attention.pallas_flash.hopper.token_ids import token_ids

    D = 64
    q, k, v, do = (torch.randn(B, n, H, D).bfloat16() for n in (N, M, M, N))
    bias = 3 * torch.randn(*shape, N, M).to(of_bias)
    bias[:, :, 5], bias[:, :, 6], bias[:, :, 7, 1::2] = -torch.inf, torch.finfo(of_bias).min, -torch.inf
    bias[:, :, 8, 1::2], bias[:, :, 9] = torch.finfo(of_bias).min, 1e38
    bias[:, :, 10, 1::2] = 1000.0
    bias.requires_grad_()
    leaves = [x.double().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    exact_bias = bias.detach().double().requires_grad_()
    mask = (torch.rand(B, 1, 1, M) < 0.8) if hides_keys else None
    exact = reference(*leaves, bias=exact_bias, mask=mask, scale=scale)
    wanted = exact, *torch.autograd.grad(exact, [*leaves, exact_bias], do.double().transpose(1, 2))

    prepared = padded_bias(bias, None, N, M, scale, hides_keys)
    assert prepared.dtype == of_bias
    dtype = str(of_bias).removeprefix("torch.")
    ids = [jnp.asarray(x.numpy()) for x in given_ids(token_ids((B, H, N, D), M, mask, None))]
    chunks = (ids[2].shape[1], ids[3].shape[1]) if ids else None
    problem = (B, H, N, M, D, "bfloat16", scale, False, H, (0, 0, 0), None, True, blocks, chunks, shape, dtype)
    array = lambda x, dtype="bfloat16": jnp.asarray(x.detach().float().numpy(), dtype)  # noqa: E731
    tensor = lambda x: torch.tensor(x.astype("float32").tolist())  # noqa: E731
    q, k, v, do = map(array, (q, k, v, do))
    given, of_keys = array(prepared, dtype), array(transposed(prepared.detach()), dtype)
    out, lse = ShortForward(*problem)(q, k, v, given, *ids)
    *found, ds = ShortBackward(*problem, stores_ds=True)(q, k, v, out, do, lse, of_keys, *ids)

    for name, x, y in zip(("out", "dq", "dk", "dv"), (out, *found), wanted, strict=False):
        assert error(tensor(x).transpose(1, 2), y) < TOLERANCE[torch.bfloat16], name
    gradient = summed(tensor(ds).bfloat16(), shape, N, scale, of_bias)
    (dbias,) = torch.autograd.grad(prepared, bias, gradient)
    assert error(dbias, wanted[4]) < TOLERANCE[torch.bfloat16]
