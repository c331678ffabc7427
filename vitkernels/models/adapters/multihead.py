"""torch.nn.MultiheadAttention, as open_clip's own towers use it.

Shape suffixes: B batch, N query tokens, M key tokens, C channels, H heads, D head dim.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels.errors import UsageError
from vitkernels.models.backend_attention import BackendAttention, split_heads


class MultiheadAttention(BackendAttention):
    """torch.nn.MultiheadAttention without its optional weights: call it with need_weights=False."""

    # torch.nn.TransformerEncoderLayer computes attention itself, in evaluation, if it reads True here.
    _qkv_same_embed_dim = property(lambda self: False)

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        assert isinstance(module, nn.MultiheadAttention)
        if module.bias_k is not None or module.add_zero_attn:
            return "it adds a key to the input (add_bias_kv or add_zero_attn)"
        return None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        """Compute what torch's forward does; boolean masks are True at positions to leave out.

        is_causal is a hint about attn_mask.
        """
        if need_weights:
            message = (
                f"attention backend {self.backend.name!r} does not return attention weights: call the module with "
                "need_weights=False, or keep torch's module"
            )
            raise UsageError(message, code="models.need_weights", backend=self.backend.name)
        if is_causal and attn_mask is None:
            message = "is_causal is a hint about attn_mask, as in torch: also pass the causal mask as attn_mask"
            raise UsageError(message, code="models.causal_hint", backend=self.backend.name)
        is_batched = query.ndim == 3
        q, k, v = self.projected(query, key, value)
        if not is_batched:
            q, k, v = q[None], k[None], v[None]
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        mask = self.joined_mask(key_padding_mask, attn_mask, q)
        drop = self.dropout if self.training else 0.0
        kind: dict[str, Any] = {} if mask is None else {"bias" if mask.dtype.is_floating_point else "mask": mask}
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        out_BNC = self.out_proj(self.backend(q, k, v, **kind, dropout_p=drop).transpose(1, 2).flatten(2))
        if not is_batched:
            return out_BNC[0], None
        return (out_BNC if self.batch_first else out_BNC.transpose(0, 1)), None

    def projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Return the projections to q, k and v; one product if all are the same tensor."""
        if self.in_proj_weight is None:  # keys and values have other widths
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif query is key is value:
            return list(F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, dim=-1))
        else:
            weights = list(self.in_proj_weight.chunk(3))
        biases = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def joined_mask(self, key_padding_mask: Tensor | None, attn_mask: Tensor | None, q_BNC: Tensor) -> Tensor | None:
        """Return both masks as one mask (True keeps) or bias for a backend, broadcastable to (B, H, N, M)."""
        if attn_mask is not None and attn_mask.ndim == 3:  # (B * H, N, M)
            attn_mask = attn_mask.unflatten(0, (len(q_BNC), self.num_heads))
        if key_padding_mask is not None:  # (B, M), or (M) without a batch
            key_padding_mask = key_padding_mask.view(len(q_BNC), 1, 1, -1)
        masks = [m for m in (attn_mask, key_padding_mask) if m is not None]
        if not masks:
            return None
        if all(m.dtype == torch.bool for m in masks):
            left_out = masks[0] if len(masks) == 1 else masks[0] | masks[1]
            return ~left_out
        biases = [
            torch.zeros_like(m, dtype=q_BNC.dtype).masked_fill(m, float("-inf")) if m.dtype == torch.bool else m
            for m in masks
        ]
        return biases[0] if len(biases) == 1 else biases[0] + biases[1]
