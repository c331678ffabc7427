"""Attention whose queries differ from its keys: class attention, pooling heads, pooled or subsampled tokens.

Shape suffixes: B batch, N tokens, C channels, H heads, D head dim, E = H * D.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import resample_abs_pos_embed
from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch import Tensor
from torch.nn import functional as F

from vitkernels.models.backend_attention import BackendAttention, split_heads


class ClassAttention(BackendAttention):
    """CaiT's, XCiT's and VOLO's class attention and CrossViT's: the first token attends to all tokens."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        heads = self.num_heads
        if hasattr(self, "kv"):  # VOLO
            q, (k, v) = self.q(x_BNC[:, :1]), self.kv(x_BNC).chunk(2, dim=-1)
        elif hasattr(self, "wq"):  # CrossViT
            q, k, v = self.wq(x_BNC[:, :1]), self.wk(x_BNC), self.wv(x_BNC)
        else:
            q, k, v = self.q(x_BNC[:, :1]), self.k(x_BNC), self.v(x_BNC)
        q, k, v = split_heads(q, heads), split_heads(k, heads), split_heads(v, heads)
        return self.project(self.attention(q, k, v, scale=self.scale))


class LatentPooling(BackendAttention):
    """timm.layers.AttentionPoolLatent (SigLIP's head): trained queries attend to the tokens."""

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        if self.pos_embed is not None:
            x_BNC = x_BNC + self.pos_embed[None].to(x_BNC.dtype)
        q = split_heads(self.q(self.latent.expand(len(x_BNC), -1, -1)), self.num_heads)
        k, v = (split_heads(x, self.num_heads) for x in self.kv(x_BNC).chunk(2, dim=-1))
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        x_BNC = self.project(self.attention(q, k, v, attn_mask, scale=self.scale))
        if self.mlp is not None:
            x_BNC = x_BNC + self.mlp(self.norm(x_BNC))
        return pooled(x_BNC, self.pool)


class PatchPooling(BackendAttention):
    """timm.layers.AttentionPoolPrr: self-attention without projections before pooling."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        x_BHND = split_heads(self.pre_norm(x_BNC), self.num_heads)
        return pooled(self.post_norm(self.attention(x_BHND, x_BHND, x_BHND, scale=self.scale)), self.pool)


def pooled(x_BNC: Tensor, pool: str) -> Tensor:
    """Return the first token, the mean of all tokens, or, for another name, all tokens."""
    if pool == "token":
        return x_BNC[:, 0]
    return x_BNC.mean(1) if pool == "avg" else x_BNC


class FeatureMapPooling(BackendAttention):
    """timm.layers.AttentionPool2d (CLIP's head) and RotAttentionPool2d: a class token attends to a feature map."""

    def forward(self, x_BCHW: Tensor, pre_logits: bool = False) -> Tensor:
        height, width = size = x_BCHW.shape[2:]
        tokens = x_BCHW.flatten(2).transpose(1, 2)
        first = tokens.mean(1, keepdim=True) if self.cls_token is None else self.cls_token.expand(len(tokens), -1, -1)
        q, k, v = self.heads(torch.cat((first, tokens), dim=1), size)
        out_BNE = self.drop(self.attention(q, k, v, scale=self.scale, **self.rotation(size)))
        out_BNE = out_BNE if pre_logits else self.proj(out_BNE)
        return self._pool(out_BNE, height, width)

    def heads(self, x_BNC: Tensor, size: Sequence[int]) -> list[Tensor]:
        """Return q, k and v of tokens with their position embedding."""
        position = resample_abs_pos_embed(
            self.pos_embed[None], list(size), old_size=self.feat_size, num_prefix_tokens=1
        )
        return self.projected(x_BNC + position)

    def projected(self, x_BNC: Tensor) -> list[Tensor]:
        if self.qkv is None:
            return [split_heads(layer(x_BNC), self.num_heads) for layer in (self.q, self.k, self.v)]
        return [split_heads(x, self.num_heads) for x in self.qkv(x_BNC).chunk(3, dim=-1)]

    def rotation(self, size: Sequence[int]) -> dict[str, Any]:
        """Return the keywords of `attention` for a rotary embedding of the map."""
        return {}


class RotaryFeatureMapPooling(FeatureMapPooling):
    """timm.layers.RotAttentionPool2d: AttentionPool2d with rotary embeddings."""

    def heads(self, x_BNC: Tensor, size: Sequence[int]) -> list[Tensor]:
        return self.projected(x_BNC)

    def rotation(self, size: Sequence[int]) -> dict[str, Any]:
        rope = self.pos_embed.get_embed(tuple(size))
        rope = torch.cat(rope, dim=-1) if isinstance(rope, tuple) else rope
        return {"rope": rope, "rope_half": getattr(self, "rotate_half", False)}


class SubsampledAttention(BackendAttention):
    """PVT v2's attention and the global attention of Twins: keys of a smaller feature map."""

    def forward(self, x_BNC: Tensor, size: Sequence[int]) -> Tensor:
        q = split_heads(self.q(x_BNC), self.num_heads)
        k, v = (split_heads(x, self.num_heads) for x in self.kv(self.subsampled(x_BNC, size)).chunk(2, dim=-1))
        return self.project(self.attention(q, k, v, scale=self.scale))

    def subsampled(self, x_BNC: Tensor, size: Sequence[int]) -> Tensor:
        if self.sr is None:
            return x_BNC
        feature_map = x_BNC.transpose(1, 2).unflatten(2, tuple(size))
        pool = getattr(self, "pool", None)  # PVT v2 with linear cost
        feature_map = self.sr(feature_map if pool is None else pool(feature_map))
        x_BNC = self.norm(feature_map.flatten(2).transpose(1, 2))
        return x_BNC if pool is None else self.act(x_BNC)


class PooledKeyAttention(BackendAttention):
    """Next-ViT's EfficientAttention: keys and values of averaged tokens."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        keys = x_BNC if self.sr is None else self.norm(self.sr(x_BNC.transpose(1, 2))).transpose(1, 2)
        q, k, v = (
            split_heads(layer(x), self.num_heads) for layer, x in ((self.q, x_BNC), (self.k, keys), (self.v, keys))
        )
        return self.project(self.attention(q, k, v, scale=self.scale))


class PaddedWindowAttention(BackendAttention):
    """The local attention of Twins: windows of the padded feature map, as batch.

    As in timm, padding takes part in attention.
    """

    def forward(self, x_BNC: Tensor, size: Sequence[int]) -> Tensor:
        (B, _, C), (height, width), window = x_BNC.shape, size, self.ws
        x = x_BNC.unflatten(1, (height, width))
        x = F.pad(x, (0, 0, 0, -width % window, 0, -height % window))
        rows, columns = x.shape[1] // window, x.shape[2] // window
        windows = x.reshape(B, rows, window, columns, window, C).transpose(2, 3).reshape(-1, window * window, C)
        qkv_BN3HD = self.qkv(windows).unflatten(-1, (3, self.num_heads, -1))
        out = self.backend.qkvpacked(qkv_BN3HD, **self.keywords(None), scale=self.scale)
        out = out.view(B, rows, columns, window, window, C).transpose(2, 3).reshape(x.shape)
        return self.project(out[:, :height, :width].reshape(x_BNC.shape))


class MaskUnitAttention(BackendAttention):
    """Hiera's attention, within mask units or over all tokens, with max-pooled queries."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        B, N, _ = x_BNC.shape
        units = N // (self.q_stride * self.window_size) if self.use_mask_unit_attn else 1
        # Token n belongs to unit n % units.
        qkv = self.qkv(x_BNC).reshape(B, -1, units, 3, self.heads, self.head_dim)
        q, k, v = qkv.permute(3, 0, 2, 4, 1, 5).flatten(1, 2).unbind(0)  # (B * units, H, tokens, D)
        if self.q_stride > 1:
            q = q.unflatten(2, (self.q_stride, -1)).amax(dim=2)
        out = self.attention(q, k, v, scale=self.scale).unflatten(0, (B, units))
        return self.proj(out.transpose(1, 2).flatten(1, 2))


class PooledQueryAttention(BackendAttention):
    """Hiera-Det's (SAM 2) attention over (B, height, width, C), whose queries a module may pool."""

    def forward(self, x_BHWC: Tensor) -> Tensor:
        qkv_BHWF = self.qkv(x_BHWC)
        q, k, v = qkv_BHWF.chunk(3, dim=-1)
        if self.q_pool is not None:
            q = self.q_pool(q.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        size = q.shape[1:3]
        q, k, v = (split_heads(x.flatten(1, 2), self.num_heads) for x in (q, k, v))
        return self.proj(self.attention(q, k, v, scale=self.scale).unflatten(1, size))


class MultiScaleAttention(BackendAttention):
    """MViT v2's attention: pooled queries, keys and values, and a decomposed bias, dense because it depends on q."""

    def forward(self, x_BNC: Tensor, feat_size: Sequence[int]) -> tuple[Tensor, Sequence[int]]:
        qkv_BN3HD = self.qkv(x_BNC).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        q, q_size = self.resized(q, feat_size, self.pool_q, self.norm_q)
        k, k_size = self.resized(k, feat_size, self.pool_k, self.norm_k)
        v, _ = self.resized(v, feat_size, self.pool_v, self.norm_v)
        bias = None
        if self.rel_pos_type == "spatial":
            zeros = q.new_zeros(*q.shape[:3], k.shape[2])  # timm adds the bias to the scores in place
            bias = cal_rel_pos_type(zeros, q, self.has_cls_token, q_size, k_size, self.rel_pos_h, self.rel_pos_w)
        out_BNE = self.attention(q.to(v.dtype), k.to(v.dtype), v, bias, scale=self.scale)
        if self.residual_pooling:
            out_BNE = out_BNE + q.transpose(1, 2).flatten(2)
        return self.proj(out_BNE), q_size

    def resized(self, x_BHND, size, pool, norm):
        if pool is not None:
            x_BHND, token = reshape_pre_pool(x_BHND, size, self.has_cls_token)
            x_BHND, size = reshape_post_pool(pool(x_BHND), self.num_heads, token)
        return (x_BHND if norm is None else norm(x_BHND)), size


class PixelAttention(BackendAttention):
    """TNT's attention: one projection yields q and k, another v."""

    def forward(self, x_BNC: Tensor) -> Tensor:
        q, k = (split_heads(x, self.num_heads) for x in self.qk(x_BNC).chunk(2, dim=-1))
        v = split_heads(self.v(x_BNC), self.num_heads)
        return self.project(self.attention(q, k, v, scale=self.scale))


class GatedPositionalAttention(PixelAttention):
    """ConViT's GPSA: the backend computes content attention; positional attention is a separate product.

    Positional attention does not depend on q and k. Dropout of the mixture is not supported.
    """

    rel_indices: torch.Tensor | None

    @classmethod
    def unsupported(cls, module: torch.nn.Module) -> str | None:
        drop = module.attn_drop.p  # type: ignore[union-attr]
        return f"it drops weights of a mixture of two softmaxes (attn_drop={drop})" if drop else None

    def forward(self, x_BNC: Tensor) -> Tensor:
        N = x_BNC.shape[1]
        if self.rel_indices is None or self.rel_indices.shape[1] != N:
            self.rel_indices = self.get_rel_indices(N)
        q, k = (split_heads(x, self.num_heads) for x in self.qk(x_BNC).chunk(2, dim=-1))
        v = split_heads(self.v(x_BNC), self.num_heads)
        by_content_BNHD = self.attention(q, k, v, scale=self.scale).unflatten(-1, (self.num_heads, -1))
        weights_1HNN = self.pos_proj(self.rel_indices).permute(0, 3, 1, 2).softmax(-1)
        by_position_BNHD = (weights_1HNN.to(v.dtype) @ v).transpose(1, 2)
        gate_H1 = self.gating_param.sigmoid()[:, None]
        mixed = (1 - gate_H1) * by_content_BNHD + gate_H1 * by_position_BNHD
        return self.project(mixed.flatten(2))


class MultiQueryAttention(BackendAttention):
    """timm.layers.MultiQueryAttention2d (MobileNet v4): all heads share one key and value head."""

    def forward(self, x_BCHW: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        query = self.query(x_BCHW)
        q = query.flatten(2).unflatten(1, (self.num_heads, self.key_dim)).mT
        k, v = (
            x.flatten(2).mT[:, None].expand(-1, self.num_heads, -1, -1) for x in (self.key(x_BCHW), self.value(x_BCHW))
        )
        out_BNE = self.attention(q, k, v, attn_mask, scale=self.scale)
        return self.output(out_BNE.transpose(1, 2).unflatten(2, query.shape[2:]))
