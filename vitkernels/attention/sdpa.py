"""torch.nn.functional.scaled_dot_product_attention: PyTorch's own choice of flash, cuDNN, efficient or math."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.contract import AttentionBackend, keep_mask
from vitkernels.attention.problem import Problem


class Sdpa(AttentionBackend):
    """Run on every device. A bias is cast to q's dtype, as SDPA requires, and stays finite.

    PyTorch's CUDA kernel is inexact in rows whose biases all are near the end of float32's range.
    """

    name = "sdpa"

    def refusal(self, problem: Problem) -> str | None:
        if problem.heads:
            return None
        # On the CPU, PyTorch divides by the number of heads, which crashes the process.
        return "PyTorch's kernels need at least one head, got 0; use backend 'native'"

    def run(self, q_BHND, k_BHMD, v_BHMD, *, bias, mask, segment_ids, is_causal, scale, dropout_p):
        if bias is None and mask is None and segment_ids is None:
            return F.scaled_dot_product_attention(
                q_BHND, k_BHMD, v_BHMD, dropout_p=dropout_p, is_causal=is_causal, scale=scale
            )
        keep = keep_mask(q_BHND, k_BHMD, mask, segment_ids, is_causal)
        if bias is not None:
            finite = bias != float("-inf")
            keep = finite if keep is None else keep & finite
        # SDPA's kernels disagree on a query without keys: let it see every key, then clear its output.
        keep = torch.atleast_2d(keep)  # SDPA rejects one-dimensional masks
        has_key = keep.any(-1, keepdim=True)
        keep = keep | ~has_key
        if bias is None:
            attn_mask = keep
        else:
            if q_BHND.is_cuda and torch.is_grad_enabled() and bias.requires_grad:
                q_BHND = requiring_gradient(q_BHND, k_BHMD, v_BHMD, bias)
            finite_bias = in_range(bias.masked_fill(bias == float("-inf"), 0.0), q_BHND.dtype)
            attn_mask = finite_bias.masked_fill(~keep, float("-inf"))
        if attn_mask.shape[-1] != k_BHMD.shape[2]:  # CUDA's kernels do not broadcast a mask over the keys
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], k_BHMD.shape[2]).contiguous()
        out_BHND = F.scaled_dot_product_attention(
            q_BHND, k_BHMD, v_BHMD, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale
        )
        return out_BHND.masked_fill(~has_key, 0.0)


def in_range(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a finite bias in `dtype`, with values beyond its range at its ends; the gradient is that of a plain cast.

    Cast to bfloat16, float32's lowest value, as padding masks have it, would become -inf.
    """
    if torch.finfo(bias.dtype).max <= torch.finfo(dtype).max:
        return bias.to(dtype)
    ends = torch.finfo(dtype)
    values = bias.detach().clamp(ends.min, ends.max).to(dtype)
    return values + (bias - bias.detach()).to(dtype) if bias.requires_grad else values


def requiring_gradient(q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, bias: Tensor) -> Tensor:
    """Return q, made to require a gradient if only the bias does: q plus a zero that depends on the bias.

    PyTorch's efficient kernel stores the log-sum-exp only if q, k or v requires a gradient, and its backward pass reads
    it for the bias's gradient too: an illegal memory access (pytorch/pytorch#148476).
    """
    if q_BHND.requires_grad or k_BHMD.requires_grad or v_BHMD.requires_grad:
        return q_BHND
    return q_BHND + bias[..., :0].sum().to(q_BHND.dtype)  # the sum of no elements: 0, with a gradient of zeros


BACKEND = Sdpa()
