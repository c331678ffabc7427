"""The reference: softmax(scale * q kᵀ + bias) v in plain PyTorch, softmax in float32 (float64 for float64 input)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.contract import AttentionBackend, keep_mask


class Native(AttentionBackend):
    """Run on every device and support every problem; materialize the (B, H, N, M) score matrix."""

    name = "native"

    def run(self, q_BHND, k_BHMD, v_BHMD, *, bias, mask, segment_ids, is_causal, scale, dropout_p):
        s_BHNM = _scores(q_BHND, k_BHMD, scale)
        keep = keep_mask(q_BHND, k_BHMD, mask, segment_ids, is_causal)
        if bias is not None:
            finite = bias != float("-inf")
            keep = finite if keep is None else keep & finite
            s_BHNM = s_BHNM + bias
        if keep is None:
            p_BHNM = s_BHNM.softmax(-1)
        else:
            # A query without keys: softmax of zeros, then exact zeros, so that no NaN arises forward or backward.
            s_BHNM = s_BHNM.masked_fill(~keep, float("-inf")).masked_fill(~keep.any(-1, keepdim=True), 0.0)
            p_BHNM = s_BHNM.softmax(-1).masked_fill(~keep, 0.0)
        p_BHNM = F.dropout(p_BHNM, dropout_p)
        return (p_BHNM.to(v_BHMD.dtype) @ v_BHMD).to(q_BHND.dtype)


def _scores(q_BHND: Tensor, k_BHMD: Tensor, scale: float) -> Tensor:
    """Return scale * q kᵀ in float32 or wider, multiplied in q's dtype; in float32 for float16, which overflows at
    65504.
    """
    if q_BHND.dtype == torch.float16:
        with torch.autocast(q_BHND.device.type, enabled=False):
            return (q_BHND.float() * scale) @ k_BHMD.float().transpose(-2, -1)
    s_BHNM = (q_BHND * scale) @ k_BHMD.transpose(-2, -1)
    return s_BHNM.to(torch.promote_types(s_BHNM.dtype, torch.float32))


BACKEND = Native()
