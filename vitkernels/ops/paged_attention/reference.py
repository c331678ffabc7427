"""The reference: gathers every sequence's pages side by side, then plain attention. Runs everywhere.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads to one, D head dim, P pages, S tokens per
page, T pages per sequence, N = T * S tokens.
"""

import torch
from torch import Tensor


def unsupported(*args) -> None:
    """It takes everything."""


def run(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    pages_per_compute_block: int,
    megacore_mode: str | None,
    attn_logits_soft_cap: float | None,
) -> Tensor:
    B, H, D = query.shape
    K, P, S, _ = key_cache.shape
    N = block_tables.shape[1] * S
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keep_BN = torch.arange(N, device=query.device) < context_lens[:, None]
    outside_BT = (block_tables < 0) | (block_tables >= P)
    outside_BN = outside_BT.repeat_interleave(S, dim=1) & keep_BN
    broken_B = outside_BN.any(1) | (context_lens < 0) | (context_lens > N)
    page_BT = block_tables.masked_fill(outside_BT, 0).long()

    def gathered(cache_KPSD: Tensor) -> Tensor:
        """(B, K, N, D). What lies in the cache past a sequence's end may be anything, NaN too."""
        rows_BKND = cache_KPSD[:, page_BT].transpose(0, 1).reshape(B, K, N, D)
        return rows_BKND.to(wide).masked_fill(~keep_BN[:, None, :, None], 0.0)

    with torch.autocast(query.device.type, enabled=False):
        q_BKGD = query.to(wide).reshape(B, K, H // K, D)
        s_BKGN = torch.einsum("bkgd,bknd->bkgn", q_BKGD, gathered(key_cache))
        if attn_logits_soft_cap is not None:
            s_BKGN = attn_logits_soft_cap * torch.tanh(s_BKGN / attn_logits_soft_cap)
        ignored_B11N = ~keep_BN[:, None, None]
        p_BKGN = torch.softmax(s_BKGN.masked_fill(ignored_B11N, float("-inf")), -1)
        p_BKGN = p_BKGN.masked_fill(ignored_B11N, 0.0)  # a sequence of no tokens has only NaN here
        out_BHD = torch.einsum("bkgn,bknd->bkgd", p_BKGN, gathered(value_cache)).reshape(B, H, D)
    return out_BHD.masked_fill(broken_B[:, None, None], float("nan")).to(query.dtype)
