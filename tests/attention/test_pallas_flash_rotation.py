"""Rotary attention of `pallas_flash` on Hopper: the operators around stand-in kernels."""

import pytest
import torch

pytest.importorskip("triton")
from hopper import error, needs_new_jax
from torch.nn import functional as F

from vitkernels.testing.attention_reference import TOLERANCE, reference, rotary_table, unpacked

H = 5


def draw(device, D, leading, N, rows, dtype=torch.float32):
    """Return qkv and rope. Sines and cosines differ within a pair, so that none can be confused."""
    return torch.randn(2, N, 3, H, D, device=device).to(dtype), torch.randn(*leading, rows, 2 * D, device=device)


class StandIn:
    """Compute in PyTorch what the kernels of AttentionKernels, with which it shares a class, compute."""

    def vector(self):
        return super().vector().zero_()  # so that calls have equal results

    def start(self, gradient, bias_gradient):
        """Compile nothing."""

    def _weights(self, q, k, bias=None):
        scores = q @ k.mT * self.scale
        if bias is not None:
            from vitkernels.attention.pallas_flash.hopper import bias_groups

            scores = scores + bias_groups.in_rows(bias, self.queries, self.keys, self.scale)
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        return scores.softmax(-1)

    def forward(self, q, k, v, *bias_out_lse):
        *bias, out, _ = bias_out_lse
        assert q is k is v and q.is_contiguous()
        q, k, v = (x.double() for x in unpacked(q))
        out.copy_((self._weights(q, k, *bias) @ v).transpose(1, 2).flatten(2))

    short_forward = forward

    def run_backward(self, q, k, v, out, lse, do, bias, ids, dq, dk, dv, needs_dbias):
        assert q is k is v and dq is dk is dv
        q, k, v = (x.double() for x in unpacked(q))
        do = do.double().unflatten(2, (self.heads, -1)).transpose(1, 2)
        p = self._weights(q, k, bias)
        ds = p * (do @ v.mT - (do @ v.mT * p).sum(-1, keepdim=True))
        dbias = None
        if needs_dbias:
            from vitkernels.attention.pallas_flash.hopper import bias_groups

            rows = F.pad(ds.mT, (0, -self.queries % 8)).float().contiguous()
            dbias = bias_groups.summed(rows, bias.shape[:2], self.queries, self.scale, bias.dtype)
        ds = ds * self.scale
        for to, x in zip(unpacked(dq), (ds @ k, ds.mT @ q, p.mT @ do), strict=True):
            to.copy_(x)
        return dbias


@pytest.fixture
def operators(monkeypatch):
    """The operators of Hopper's kernels, on the CPU."""
    from vitkernels.attention.pallas_flash.hopper import operators
    from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels

    monkeypatch.setattr(operators, "kernels_for", type("PyTorchKernels", (StandIn, AttentionKernels), {}))
    return operators


NOTHING = (None,) * 6  # no bias and no ids


@needs_new_jax
@pytest.mark.parametrize("rope_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotary_attention(operators, dtype, rope_half):
    qkv, rope = draw("cpu", 64, (2, 1), 37, 33, dtype)
    qkv.requires_grad_()
    attend = lambda: operators.attend_rotary(qkv, rope, rope_half, *NOTHING, False, 0.1)  # noqa: E731
    given = qkv.detach().clone()
    out = attend()[0]
    do = torch.randn_like(out)
    (dqkv,) = torch.autograd.grad(out, qkv, do)
    leaf = given.double().requires_grad_()
    exact = reference(*unpacked(leaf), rope=rope, rope_half=rope_half, scale=0.1).transpose(1, 2).flatten(2)
    (exact_grad,) = torch.autograd.grad(exact, leaf, do.double())
    assert torch.equal(qkv, given)
    assert error(out, exact) < TOLERANCE[dtype]
    for i in range(3):
        assert error(dqkv[:, :, i], exact_grad[:, :, i]) < TOLERANCE[dtype], "qkv"[i]


@needs_new_jax
@pytest.mark.parametrize("compiled", [False, True])
def test_rotary_attention__with_a_bias(operators, compiled):
    """The gradient reaches the bias, and is None for one that needs none."""
    from vitkernels.attention.pallas_flash.hopper.bias import padded_bias

    torch._dynamo.reset()
    qkv, rope = draw("cpu", 64, (), 37, 33, torch.float32)
    H = qkv.shape[3]
    qkv, bias = qkv.requires_grad_(), torch.randn(H, 37, 37).requires_grad_()

    def attend(qkv, bias):
        call = padded_bias(bias, None, 37, 37, 0.1), *NOTHING[1:], False, 0.1
        return operators.attend_rotary(qkv, rope, False, *call)[0]

    run = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiled else attend
    found = run(qkv, bias)
    do = torch.randn_like(found)
    leaves = [x.detach().double().requires_grad_() for x in (qkv, bias)]
    exact = reference(*unpacked(leaves[0]), bias=leaves[1], rope=rope, rope_half=False, scale=0.1)
    wanted = torch.autograd.grad(exact.transpose(1, 2).flatten(2), leaves, do.double())
    for x, y in zip(torch.autograd.grad(found, (qkv, bias), do), wanted, strict=True):
        assert error(x, y) < TOLERANCE[torch.float32]
    (alone,) = torch.autograd.grad(run(qkv, bias.detach()), qkv, do)
    assert error(alone, wanted[0]) < TOLERANCE[torch.float32]


@needs_new_jax
def test_rotary_attention__saves_only_rotated_qkv(operators):
    """The projection's output is free after the forward pass, so that memory is as without rope."""
    qkv, rope = draw("cpu", 64, (), 37, 33)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        operators.attend_rotary(qkv.requires_grad_(), rope, False, *NOTHING, False, 0.1)
    packed = [x for x in saved if x is not None and x.shape == qkv.shape]
    assert len(packed) == 1 and packed[0].data_ptr() != qkv.data_ptr()


@needs_new_jax
def test_rotary_attention__compiled(operators):
    torch._dynamo.reset()
    qkv = draw("cpu", 64, (), 37, 33)[0].requires_grad_()
    rope = rotary_table("cpu", 33, 64, True)

    def model(x):
        return operators.attend_rotary(x * 1.5, rope, True, *NOTHING, True, 0.1)[0].relu()

    out, compiled = model(qkv), torch.compile(model, fullgraph=True, backend="aot_eager")(qkv)
    assert torch.equal(compiled, out)
    assert torch.equal(*(torch.autograd.grad(y.sum(), qkv)[0] for y in (out, compiled)))


@needs_new_jax
def test_rotary_operators__pass_opcheck(operators):
    qkv, rope = draw("cpu", 32, (), 9, 8)
    call = (*NOTHING, False, 0.1)
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(operators.attend_rotary.traced, (qkv.requires_grad_(), rope, True, *call), test_utils=checks)
    out, lse, turned = operators.attend_rotary(qkv.detach(), rope, True, *call)
    torch.library.opcheck(
        operators.attend_rotary_backward.traced,
        (torch.randn_like(out), out, lse, turned, rope, True, False, *call),
        test_utils=checks[:2],
    )
