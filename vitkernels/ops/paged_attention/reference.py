"""The reference in plain PyTorch: gather each sequence's pages, then compute attention.

Shape suffixes: B sequences, H query heads, K key heads, G = H / K query heads per key head, D head dim, P pages,
S tokens per page, T pages per sequence, N = T * S tokens.
"""

import torch
from torch import Tensor

from vitkernels.ops.paged_attention.decode_batch import DecodeBatch


def unsupported(*args) -> None:
    """Accept every call."""


def run(batch: DecodeBatch) -> Tensor:
    query, context_lens, block_tables, soft_cap = batch.query, batch.context_lens, batch.block_tables, batch.soft_cap
    B, H, D = query.shape
    K, P, S, _ = batch.key_cache.shape
    N = block_tables.shape[1] * S
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    keep_BN = torch.arange(N, device=query.device) < context_lens[:, None]
    outside_BT = (block_tables < 0) | (block_tables >= P)
    outside_BN = outside_BT.repeat_interleave(S, dim=1) & keep_BN
    invalid_B = outside_BN.any(1) | (context_lens < 0) | (context_lens > N)
    page_BT = block_tables.masked_fill(outside_BT, 0).long()

    def gathered(cache_KPSD: Tensor) -> Tensor:
        """Return (B, K, N, D) with zeros past each sequence's end, where the cache may hold anything, NaN included."""
        rows_BKND = cache_KPSD[:, page_BT].transpose(0, 1).reshape(B, K, N, D)
        return rows_BKND.to(wide).masked_fill(~keep_BN[:, None, :, None], 0.0)

    with torch.autocast(query.device.type, enabled=False):
        q_BKGD = query.to(wide).reshape(B, K, H // K, D)
        s_BKGN = torch.einsum("bkgd,bknd->bkgn", q_BKGD, gathered(batch.key_cache))
        if soft_cap is not None:
            s_BKGN = soft_cap * torch.tanh(s_BKGN / soft_cap)
        ignored_B11N = ~keep_BN[:, None, None]
        p_BKGN = torch.softmax(s_BKGN.masked_fill(ignored_B11N, float("-inf")), -1)
        p_BKGN = p_BKGN.masked_fill(ignored_B11N, 0.0)  # the softmax of a sequence without tokens is NaN
        out_BHD = torch.einsum("bkgn,bknd->bkgd", p_BKGN, gathered(batch.value_cache)).reshape(B, H, D)
    return out_BHD.masked_fill(invalid_B[:, None, None], float("nan")).to(query.dtype)
