"""Test data for attention backends: shapes of vision transformers, tolerances, and a float64 reference.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

# Tokens of the usual ViTs, with and without a class token; one token; a long sequence.
LENGTHS = (1, 49, 196, 197, 256, 257, 577, 640, 729, 1025, 4096)
HEAD_DIMS = tuple(range(16, 257, 8))
# Not multiples of 8: a backend refuses them or is correct.
ODD_HEAD_DIMS = (1, 7, 36, 50, 100, 127)
# (B, H), more than two or three of each.
MANY = ((3, 4), (1, 6), (5, 1), (9, 16))

# ‖x - reference‖ / ‖reference‖ against float64.
TOLERANCE = {
    # Sums of up to 4096 products, each rounded to 2⁻²⁴: 64 · 6e-8 = 4e-6 if the errors were random; exp adds some.
    torch.float32: 1e-5,
    # Roundings of 2⁻¹² in the weights, in the result, and in scores that reach 4: a few times 2.4e-4.
    torch.float16: 3e-3,
    # The same with 2⁻⁹.
    torch.bfloat16: 2e-2,
}


def batch_and_heads(tokens: int) -> tuple[int, int]:
    """Return (B, H): enough of both to detect a kernel that confuses them, fewer for long sequences."""
    return (2, 3) if tokens < 64 else (1, 2)


def reference(
    q, k, v, bias=None, mask=None, segment_ids=None, is_causal=False, scale=None, rope=None, rope_half=False
) -> Tensor:
    """Return attention in float64, written from the contract and sharing no code with any backend."""
    q, k, v = q.double(), k.double(), v.double()
    if rope is not None:
        q, k = (torch.einsum("...nd,...nde->...ne", x, rotations(rope, x.shape[2], rope_half)) for x in (q, k))
    N, M = q.shape[2], k.shape[2]
    s = torch.einsum("bhnd,bhmd->bhnm", q, k) * (q.shape[3] ** -0.5 if scale is None else scale)
    keep = torch.ones_like(s, dtype=torch.bool)
    if bias is not None:
        s = s + bias.double()
        keep = keep & (bias > float("-inf"))
    if mask is not None:
        keep = keep & mask
    if segment_ids is not None:
        keep = keep & (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])
    if is_causal:
        keep = keep & torch.ones(N, M, dtype=torch.bool, device=q.device).tril()
    lowest = torch.finfo(s.dtype).min
    s = s.masked_fill(~keep, lowest)
    p = torch.exp(s - s.detach().amax(-1, keepdim=True)).masked_fill(~keep, 0.0)
    total = p.sum(-1, keepdim=True)
    return torch.einsum("bhnm,bhmd->bhnd", p / torch.where(total == 0, 1.0, total), v)


def rotary_table(device, tokens: int, D: int, rope_half: bool) -> Tensor:
    """Return sines and cosines (tokens, 2 D) of one angle per pair, as models have them."""
    angles = torch.arange(tokens, device=device)[:, None] * 100 ** -torch.arange(0, 1, 2 / D, device=device)
    angles = angles.repeat(1, 2) if rope_half else angles.repeat_interleave(2, 1)
    return torch.cat([angles.sin(), angles.cos()], 1)


def rotations(rope: Tensor, tokens: int, rope_half: bool) -> Tensor:
    """Return each token's rotation as a matrix (..., tokens, D, D) that multiplies a row from the right."""
    *leading, rows, width = rope.shape
    D = width // 2
    sin, cos = rope.double().split(D, -1)
    matrices = torch.eye(D, dtype=torch.float64, device=rope.device).repeat(*leading, tokens, 1, 1)
    for row in range(rows):
        matrices[..., tokens - rows + row, :, :] = torch.diag_embed(cos[..., row, :])
        for column in range(D):
            if rope_half:
                source, sign = (column + D // 2, -1) if column < D // 2 else (column - D // 2, 1)
            else:
                source, sign = (column + 1, -1) if column % 2 == 0 else (column - 1, 1)
            matrices[..., tokens - rows + row, source, column] = sign * sin[..., row, column]
    return matrices


def relative_error(x: Tensor, exact: Tensor) -> float:
    """Return ‖x - exact‖ / ‖exact‖, or the root mean square of the error if `exact` is 0.

    dq and dk of a single token are 0: differences of equal terms near 1, each with its rounding.
    """
    size = exact.norm()
    if size <= 1e-12 * exact.numel() ** 0.5:  # 0 up to float64's rounding
        size = size.new_tensor(exact.numel() ** 0.5)
    return ((x.double() - exact).norm() / size.clamp_min(1.0)).item()


def draw(device, B, H, N, D, dtype=torch.float32, M=None) -> list[Tensor]:
    """Return random q (B, H, N, D), k and v (B, H, M, D) that require gradients; M defaults to N."""
    shape = lambda tokens: (B, H, tokens, D)  # noqa: E731
    tokens = (N, M or N, M or N)
    return [torch.randn(shape(n), device=device).to(dtype).requires_grad_() for n in tokens]


def draw_packed(device, B, N, H, D, dtype=torch.float32) -> Tensor:
    """Return random qkv (B, N, 3, H, D) that requires a gradient."""
    return torch.randn(B, N, 3, H, D, device=device).to(dtype).requires_grad_()


def unpacked(qkv_BN3HD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the views q, k, v (B, H, N, D) of a packed projection."""
    q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    return q_BHND, k_BHND, v_BHND


@contextmanager
def unchanged(*given: object) -> Iterator[None]:
    """Check that a call does not modify its inputs, from which the reference is computed afterwards."""
    tensors = [x for x in given if isinstance(x, Tensor)]
    before = [x.detach().clone() for x in tensors]
    yield
    assert all(map(torch.equal, tensors, before)), "the call changed its inputs"
