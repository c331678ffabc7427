"""torch.nn.functional.scaled_dot_product_attention: PyTorch's own choice of flash, cuDNN, efficient or math."""

import torch
from torch.nn import functional as F

from vitkernels.attention.contract import AttentionBackend, Problem, keep_mask


class Sdpa(AttentionBackend):
    """Runs everywhere. A bias is used in q's dtype, as SDPA demands."""

    name = "sdpa"

    def refusal(self, problem: Problem) -> str | None:
        # On the CPU PyTorch divides by the number of heads, and the process ends.
        return None if problem.heads else "PyTorch's kernels need at least one head, and there is none; use attn=native"

    def run(self, q_BHND, k_BHMD, v_BHMD, *, bias, mask, segment_ids, is_causal, scale, dropout_p):
        if bias is None and mask is None and segment_ids is None:
            return F.scaled_dot_product_attention(
                q_BHND, k_BHMD, v_BHMD, dropout_p=dropout_p, is_causal=is_causal, scale=scale
            )
        keep = keep_mask(q_BHND, k_BHMD, mask, segment_ids, is_causal)
        if bias is not None:
            finite = bias != float("-inf")
            keep = finite if keep is None else keep & finite
        # SDPA's kernels disagree on a query that has no key: let it see every key, then clear its output.
        keep = torch.atleast_2d(keep)  # SDPA takes no mask over keys alone
        has_key = keep.any(-1, keepdim=True)
        keep = keep | ~has_key
        if bias is None:
            attn_mask = keep
        else:
            attn_mask = bias.to(q_BHND.dtype).masked_fill(bias == float("-inf"), 0.0).masked_fill(~keep, float("-inf"))
        if attn_mask.shape[-1] != k_BHMD.shape[2]:  # CUDA's kernels want it written out over the keys
            attn_mask = attn_mask.expand(*attn_mask.shape[:-1], k_BHMD.shape[2]).contiguous()
        out_BHND = F.scaled_dot_product_attention(
            q_BHND, k_BHMD, v_BHMD, attn_mask=attn_mask, dropout_p=dropout_p, scale=scale
        )
        return out_BHND.masked_fill(~has_key, 0.0)


BACKEND = Sdpa()
