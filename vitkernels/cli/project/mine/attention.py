"""An attention backend: replace `run` with your kernel, and let `refusal` state what it does not support.

Shapes: B batch, H heads, N queries, M keys, D head dim.
"""

import torch
from torch import Tensor

from vitkernels.attention import AttentionBackend, Problem


class Mine(AttentionBackend):
    """Softmax attention, with scores in float32 or wider."""

    name = "mine"

    def refusal(self, problem: Problem) -> str | None:
        """Return why a call is not supported, or None."""
        if problem.bias_shape or problem.has_mask or problem.has_segment_ids or problem.is_causal:
            return "supports no bias, mask, segment_ids or is_causal; use sdpa"
        return f"does not support dropout (dropout_p={problem.dropout_p}); use sdpa" if problem.dropout_p else None

    def run(
        self, q_BHND: Tensor, k_BHMD: Tensor, v_BHMD: Tensor, *, bias, mask, segment_ids, is_causal, scale, dropout_p
    ) -> Tensor:
        """Return the attention (B, H, N, D) of a call that `refusal` accepts."""
        wide = torch.promote_types(q_BHND.dtype, torch.float32)
        scores_BHNM = (q_BHND.to(wide) * scale) @ k_BHMD.to(wide).transpose(-2, -1)
        return scores_BHNM.softmax(-1).to(v_BHMD.dtype) @ v_BHMD
