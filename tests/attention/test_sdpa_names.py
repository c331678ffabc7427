"""attn_mask= and enable_gqa=, as SDPA names them."""

import pytest
import torch
from expecting import error
from torch.nn import functional as F

from vitkernels import attention

NATIVE = attention.get("native")


def heads(count: int, tokens: int = 7) -> torch.Tensor:
    return torch.randn(2, count, tokens, 16, dtype=torch.float64)


@pytest.mark.parametrize("mask", [torch.randn(7, 7, dtype=torch.float64), torch.ones(7, 7, dtype=torch.bool).tril()])
def test_attn_mask__becomes_bias_or_mask(mask):
    q, k, v = heads(4), heads(4), heads(4)
    want = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(NATIVE(q, k, v, attn_mask=mask), want)
    packed = torch.stack([x.transpose(1, 2) for x in (q, k, v)], dim=2)
    torch.testing.assert_close(NATIVE.qkvpacked(packed, attn_mask=mask), want.transpose(1, 2).flatten(2))
    problem = attention.Problem.of(q, k, v, attn_mask=mask)
    assert problem.has_mask == (mask.dtype == torch.bool) and (problem.bias_shape is None) == problem.has_mask


def test_attn_mask__refused_together_with_mask_or_bias():
    q, k, v = heads(4), heads(4), heads(4)
    bias = torch.zeros(7, 7, dtype=torch.float64)
    for other in ({"bias": bias}, {"mask": bias == 0}):
        with error("attention.attn_mask", other=next(iter(other))):
            NATIVE(q, k, v, attn_mask=bias, **other)


def test_attn_mask__of_integers_is_refused():
    q, k, v = heads(4), heads(4), heads(4)
    with error("attention.dtype", name="mask"):
        NATIVE(q, k, v, attn_mask=torch.ones(7, 7, dtype=torch.int32))


def test_enable_gqa__matches_sdpa():
    q, k, v = heads(6), heads(2, tokens=5), heads(2, tokens=5)
    want = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(NATIVE(q, k, v, enable_gqa=True), want)
    assert NATIVE.unsupported(q, k, v, enable_gqa=True) is None


def test_enable_gqa__refuses_head_counts_that_do_not_divide():
    with error("attention.enable_gqa", heads=6, groups=4):
        NATIVE(heads(6), heads(4), heads(4), enable_gqa=True)
    with error("attention.shape"):  # without it, heads must be equal
        NATIVE(heads(6), heads(2), heads(2))


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(2, 3)])
def test_enable_gqa__checks_dimensions_first(x):
    with error("attention.shape"):
        NATIVE(x, x, x, enable_gqa=True)
