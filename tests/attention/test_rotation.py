"""The kernel that rotates q and k for `triton_flash` and `pallas_flash`, and its operator."""

import pytest
import torch

pytest.importorskip("triton")

from vitkernels.attention.contract import rotated
from vitkernels.attention.rotation import HEADS, fill_rotated, rotate
from vitkernels.testing.attention_reference import rotations, unpacked

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
H = HEADS + 1

# (head dim, leading dims of rope, tokens, rotated tokens): all and some tokens rotated, ragged and full blocks of 4, 8
# and 16 tokens.
CASES = [
    (64, (), 32, 32),
    (64, (1, H), 37, 36),
    (40, (2, 1), 65, 60),
    (80, (2, H), 35, 30),
    (32, (H,), 1, 1),
]


def draw(device, D, leading, N, rows, dtype=torch.float32, of_rope=torch.float32):
    """Return qkv and rope. Sines and cosines differ within a pair, so that none can be confused."""
    return (
        torch.randn(2, N, 3, H, D, device=device).to(dtype),
        torch.randn(*leading, rows, 2 * D, device=device).to(of_rope),
    )


def exact_rotation(qkv, rope, rope_half, inverse=False):
    """Return qkv with q and k multiplied by their tokens' matrices, in float64."""
    N, D = qkv.shape[1], qkv.shape[4]
    matrices = rotations(rope, N, rope_half).expand(2, H, N, D, D)
    q, k, v = (x.double() for x in unpacked(qkv))
    q, k = (torch.einsum("bhnd,bhnde->bhne", x, matrices.mT if inverse else matrices) for x in (q, k))
    return torch.stack([q, k, v]).permute(1, 3, 0, 2, 4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rope_half", [False, True])
@pytest.mark.parametrize("D, leading, N, rows", CASES)
def test_kernel(device, D, leading, N, rows, rope_half, inverse):
    qkv, rope = draw(device, D, leading, N, rows)
    out = torch.full_like(qkv, float("nan"))
    fill_rotated(qkv, out, rope, rope_half, inverse)
    # Two float32 products and their sum.
    torch.testing.assert_close(out.double(), exact_rotation(qkv, rope, rope_half, inverse), rtol=1e-6, atol=1e-6)
    assert torch.equal(out[:, : N - rows], qkv[:, : N - rows]) and torch.equal(out[:, :, 2], qkv[:, :, 2])
    fill_rotated(qkv[:, :, :2], qkv[:, :, :2], rope, rope_half, inverse)  # in place
    assert torch.equal(qkv, out)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rope_half", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("of_rope", [torch.float32, torch.bfloat16])
def test_kernel__in_half_precision(device, dtype, of_rope, rope_half):
    """Results are those of float32 arithmetic, rounded once."""
    qkv, rope = draw(device, 64, (), 37, 33, dtype, of_rope)
    out = torch.full_like(qkv, float("nan"))
    fill_rotated(qkv, out, rope, rope_half)
    exact = exact_rotation(qkv, rope, rope_half)
    # Half a unit in the last place; float32's error exceeds this share of it only where the products cancel.
    assert (out.double() - exact).abs().le(0.5001 * torch.finfo(dtype).eps * exact.abs() + 1e-6).all()
    fill_rotated(qkv[:, :, :2], qkv[:, :, :2], rope, rope_half)
    assert torch.equal(qkv, out)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel__reads_any_layout(device):
    qkv, rope = draw(device, 64, (), 37, 33)
    expected = torch.empty_like(qkv)
    fill_rotated(qkv, expected, rope, True)
    wide = torch.full((2, 37, 3, H, 80), float("nan"), device=device)
    wide[..., :64] = qkv
    odd = torch.empty(qkv.numel() + 1, device=device)[1:].view(qkv.shape).copy_(qkv)  # not aligned
    by_part = qkv.permute(2, 0, 3, 1, 4).contiguous().permute(1, 3, 0, 2, 4)
    gaps = torch.stack([rope, torch.full_like(rope, float("nan"))], -1)[..., 0]
    for x in (wide[..., :64], odd, by_part, qkv.mT.contiguous().mT):
        out = torch.full_like(expected, float("nan"))
        fill_rotated(x, out, gaps, True)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rope_half", [False, True])
def test_rotate__has_the_gradient_of_the_plain_rotation(device, rope_half):
    """q as a view of packed qkv; the result is rows of tokens, which need no copy."""
    qkv, rope = draw(device, 64, (), 37, 33)
    q = unpacked(qkv)[0].requires_grad_()
    out, expected = rotate(q, rope, rope_half, False), rotated(q, rope, rope_half)
    do = torch.randn_like(expected)
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    (dq,), (exact,) = torch.autograd.grad(out, q, do), torch.autograd.grad(expected, q, do)
    torch.testing.assert_close(dq, exact)


@pytest.mark.parametrize("device", DEVICES)
def test_rotate__passes_opcheck(device):
    qkv, rope = draw(device, 32, (), 9, 8)
    q = unpacked(qkv)[0].requires_grad_()
    checks = ("test_schema", "test_faketensor", "test_autograd_registration", "test_aot_dispatch_static")
    torch.library.opcheck(rotate.traced, (q, rope, True, False), test_utils=checks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("N", [20, 1])
def test_operator__of_one_head(device, N):
    """Its stride is arbitrary, even 1, which Triton compiles as a constant."""
    x = torch.randn(2, N, 64, device=device).unsqueeze(-1).movedim(-1, 1)
    rope = torch.randn(N, 128, device=device)
    assert x.stride(1) == 1
    assert torch.equal(rotate(x, rope, False, False), rotate(x.clone(), rope, False, False))
