"""Self-attention of a packed projection, over tokens, image blocks, grids and feature maps; differential attention.

Shape suffixes: B batch, N tokens, C channels, H heads, D head dim, E = H * D, F = 3 * E, 3 = q, k, v.
"""

from typing import Any

import torch
from torch import Tensor, nn

from vitkernels.models.backend_attention import BackendAttention, split_heads


class PackedAttention(BackendAttention):
    """Plain self-attention of tokens: metaformer's Attention, ConViT's MHSA, DaViT's windows."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        qkv_BN3HD = self.qkv(x_BNC).unflatten(-1, (3, self.num_heads, -1))
        return self.project(self.backend.qkvpacked(qkv_BN3HD, **self.keywords(None), scale=self.scale))


class ImageBlockAttention(BackendAttention):
    """Self-attention within each image block of NesT: (B, blocks, N, C)."""

    def forward(self, x_BTNC: Tensor) -> Tensor:
        qkv_BN3HD = self.qkv(x_BTNC.flatten(0, 1)).unflatten(-1, (3, self.num_heads, -1))
        out_BNE = self.backend.qkvpacked(qkv_BN3HD, **self.keywords(None), scale=self.scale)
        # NesT joins the heads with the head as the last axis.
        joined_BNE = out_BNE.unflatten(-1, (self.num_heads, -1)).transpose(-1, -2).flatten(-2)
        return self.project(joined_BNE.unflatten(0, x_BTNC.shape[:2]))


class GridAttention(PackedAttention):
    """Self-attention of VOLO's grids: (B, height, width, C)."""

    def forward(self, x_BHWC: Tensor) -> Tensor:
        return super().forward(x_BHWC.flatten(1, 2)).unflatten(1, x_BHWC.shape[1:3])


class FeatureMapAttention(PackedAttention):
    """Self-attention of FastViT's feature maps: (B, C, height, width)."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        tokens_BNC = x_BCHW.flatten(2).transpose(1, 2)
        return super().forward(tokens_BNC).transpose(1, 2).unflatten(2, x_BCHW.shape[2:])


class PackedFeatureMapAttention(BackendAttention):
    """Visformer's attention over feature maps, with packed heads of their own width."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        qkv = self.qkv(x_BCHW).flatten(2).unflatten(1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv.permute(1, 0, 2, 4, 3).unbind(0)
        out_BNE = self.attention(q, k, v, scale=self.scale)
        return self.project(out_BNE.transpose(1, 2).unflatten(2, x_BCHW.shape[2:]))


class HeadAttention(BackendAttention):
    """Base of the adapters of timm's self-attention: masks, normalized q and k, a normalized and gated result."""

    def attend(
        self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """Return attention's result before the output projection: (B, N, C) -> (B, N, E).

        attn_mask: a bias if it is floating point, otherwise a boolean mask that is True at positions to keep.
        rope: sines and cosines of the rotary position embedding, for a module that has one.
        """
        out_BNE = self.attend_packed(self.packed_qkv(x_BNC), attn_mask, is_causal, rope)
        gate = getattr(self, "gate", None)  # absent before timm 1.0.30
        return out_BNE if gate is None else out_BNE * gate(x_BNC).sigmoid()

    def packed_qkv(self, x_BNC: Tensor) -> Tensor:
        """Return the projections to q, k and v: (B, N, 3 * E)."""
        return self.qkv(x_BNC)

    def attend_packed(
        self, qkv_BNF: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        """Return the result of `attend`, without its gate, from the projection's output: (B, N, 3 * E) -> (B, N, E)."""
        qkv_BN3HD = qkv_BNF.unflatten(-1, (3, self.num_heads, self.head_dim))
        if not self.normalizes_keys:
            keywords = self.keywords(attn_mask, is_causal=is_causal) | self.rotation(rope)
            return self.norm(self.backend.qkvpacked(qkv_BN3HD, **keywords, scale=self.scale))
        q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        return self.attend_heads(q_BHND, k_BHND, v_BHND, attn_mask, is_causal, rope)

    def attend_heads(
        self,
        q_BHND: Tensor,
        k_BHND: Tensor,
        v_BHND: Tensor,
        attn_mask: Tensor | None,
        is_causal: bool,
        rope: Tensor | None,
    ) -> Tensor:
        """Normalize q and k, attend, and normalize the result: (B, N, E)."""
        # Under autocast, norms return float32; backends expect one dtype.
        q_BHND, k_BHND = self.q_norm(q_BHND).to(v_BHND.dtype), self.k_norm(k_BHND).to(v_BHND.dtype)
        groups = q_BHND.shape[1] // k_BHND.shape[1]
        if groups > 1:
            k_BHND, v_BHND = (x.repeat_interleave(groups, dim=1) for x in (k_BHND, v_BHND))
        keywords = {"scale": self.scale, "is_causal": is_causal, **self.rotation(rope)}
        return self.norm(self.attention(q_BHND, k_BHND, v_BHND, attn_mask, **keywords))

    def rotation(self, rope: Tensor | None) -> dict[str, Any]:
        """Return the backend's keywords for a rotary embedding, which covers the tokens after class and registers."""
        return {} if rope is None else {"rope": rope, "rope_half": getattr(self, "rotate_half", False)}

    @property
    def normalizes_keys(self) -> bool:
        """Return whether q and k change between the projection and the scores, other than by a rotation."""
        return not (isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity))

    @property
    def has_gate(self) -> bool:
        """Return whether the result is multiplied by a gate of the input."""
        return getattr(self, "gate", None) is not None


class SelfAttention(HeadAttention):
    """timm.layers.Attention."""

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.project(self.attend(x_BNC, attn_mask, is_causal))

    @property
    def keys_reach_scores(self) -> bool:  # type: ignore[override]
        return not self.normalizes_keys


class DifferentialAttention(BackendAttention):
    """timm.layers.DiffAttention: the difference of two softmaxes, as two calls over the same values."""

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        q, k, v = self.qkv(x_BNC).chunk(3, dim=-1)
        return self.project(self.norm(self.difference(q, k, v, attn_mask, is_causal)))

    def difference(
        self, q_BNC: Tensor, k_BNC: Tensor, v_BNC: Tensor, attn_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """Return (softmax(q1 k1ᵀ) - λ softmax(q2 k2ᵀ)) v, normalized per head: (B, N, C)."""
        v_BHND = split_heads(v_BNC, self.num_heads)
        q_BHND, k_BHND = (
            norm(split_heads(x, 2 * self.num_heads)).to(v_BHND.dtype)
            for norm, x in ((self.q_norm, q_BNC), (self.k_norm, k_BNC))
        )
        first, second = (
            self.attention(
                q_BHND[:, n::2], k_BHND[:, n::2], v_BHND, attn_mask, scale=self.scale, is_causal=is_causal
            ).unflatten(-1, (self.num_heads, -1))
            for n in (0, 1)
        )
        out_BNHD = self.sub_norm(first - self._compute_lambda().type_as(second) * second)
        return (out_BNHD * (1 - self.lambda_init)).flatten(2)


class ParallelBlockAttention(BackendAttention):
    """timm's ParallelScalingBlock (ViT-22B): attention and MLP of one input projection, added together."""

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        hidden, q, k, v = self.in_proj(self.in_norm(x_BNC)).split(self.in_split, dim=-1)
        if self.mlp_bias is not None:
            hidden = hidden + self.mlp_bias
        hidden = self.mlp_drop(self.mlp_act(hidden))
        attended = self.attend(q, k, v, attn_mask, is_causal)
        if getattr(self, "out_proj", None) is not None:
            y_BNC = self.out_proj(torch.cat((attended, hidden), dim=-1))
        else:
            y_BNC = self.attn_out_proj(attended) + self.mlp_out_proj(hidden)
        return x_BNC + self.drop_path(self.ls(y_BNC))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        q, k, v = (split_heads(x, self.num_heads) for x in (q, k, v))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.attention(q, k, v, attn_mask, scale=self.scale, is_causal=is_causal)


class DifferentialParallelBlockAttention(ParallelBlockAttention, DifferentialAttention):
    """timm's DiffParallelScalingBlock: the parallel block with differential attention."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool) -> Tensor:
        return self.difference(q, k, v, attn_mask, is_causal)
