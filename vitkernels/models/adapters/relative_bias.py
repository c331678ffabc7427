"""Self-attention with a relative position bias, which the backend adds to the scores; windows are batch entries.

Shape suffixes: B batch or windows, N tokens, M key tokens, C channels, H heads, D head dim, W windows of an image.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.autocast import dtype_of
from vitkernels.models.adapters.rotary_attention import biased_qkv
from vitkernels.models.backend_attention import BackendAttention, split_heads

_LARGEST_LOGIT_SCALE = math.log(100)  # of Swin V2's cosine attention


class BiasedAttention(BackendAttention):
    """Self-attention of a packed projection with a bias (1, H, N, N)."""

    keys_reach_scores = True

    def attend_with_bias(self, qkv_BNF: Tensor, bias_1HNN: Tensor | None, segment_ids: Tensor | None = None) -> Tensor:
        qkv_BN3HD = qkv_BNF.unflatten(-1, (3, self.num_heads, -1))
        keywords = self.keywords(as_autocast(bias_1HNN))
        return self.backend.qkvpacked(qkv_BN3HD, **keywords, segment_ids=segment_ids, scale=self.scale)


def as_autocast(bias: Tensor | None) -> Tensor | None:
    """Return a bias in autocast's dtype. PyTorch's SDPA, which timm calls, casts it in the same way.

    Kernels then read half as many bytes. A mask in float32 may be below the range of that dtype, so only relative
    positions are cast.
    """
    return bias if bias is None else bias.to(dtype_of(bias))


class BeitAttention(BiasedAttention):
    """BEiT's attention: its own table of biases, a table that all blocks share, or both."""

    def forward(self, x_BNC: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        return self.project(self.attend(x_BNC, shared_rel_pos_bias))

    def attend(self, x_BNC: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        """Return attention's result before the output projection: (B, N, C) -> (B, N, E)."""
        bias = None if self.relative_position_bias_table is None else self._get_rel_pos_bias()
        if shared_rel_pos_bias is not None:
            bias = shared_rel_pos_bias if bias is None else bias + shared_rel_pos_bias
        return self.attend_with_bias(biased_qkv(self, x_BNC), bias)


class RelPosAttention(BiasedAttention):
    """vision_transformer_relpos: the bias of a module, rel_pos, of the block or of the model."""

    def forward(self, x_BNC: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        qkv_BN3HD = self.qkv(x_BNC).unflatten(-1, (3, self.num_heads, self.head_dim))
        q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        return self.project(self.attention(q, k, v, relative_bias(self, shared_rel_pos), scale=self.scale))


def relative_bias(module: BackendAttention, shared: Tensor | None) -> Tensor | None:
    """Return the bias (1, H, N, N) of the module's own rel_pos, otherwise the shared one."""
    return as_autocast(shared if module.rel_pos is None else module.rel_pos.get_bias())


class WindowAttention(BiasedAttention):
    """Swin's windows, each an entry of the batch. The regions of a shifted window are segments.

    Swin adds -100 to the scores between two regions. Segments exclude such pairs, which gives the same result in
    float32 unless scores differ by 80 or more.
    """

    def forward(self, x_BNC: Tensor, mask: Tensor | None = None) -> Tensor:
        segment_ids = None if mask is None else window_segments(mask, len(x_BNC))
        return self.project(self.attend_with_bias(self.qkv(x_BNC), self._get_rel_pos_bias(), segment_ids))


class CosineWindowAttention(BackendAttention):
    """Swin V2's windows: cosine similarity with a trained temperature per head."""

    def forward(self, x_BNC: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv_BN3HD = self.packed_qkv(x_BNC).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        # A trained scale is a factor of q.
        q = F.normalize(q, dim=-1) * self.logit_scale.view(-1, 1, 1).clamp(max=_LARGEST_LOGIT_SCALE).exp()
        q, k = q.to(v.dtype), F.normalize(k, dim=-1).to(v.dtype)
        segment_ids = None if mask is None else window_segments(mask, len(x_BNC))
        return self.project(self.attention(q, k, v, self.bias(), scale=1.0, segment_ids=segment_ids))

    def packed_qkv(self, x_BNC: Tensor) -> Tensor:
        return biased_qkv(self, x_BNC)

    def bias(self) -> Tensor:
        """Return the bias (1, H, N, N) that a small MLP computes from log-spaced offsets."""
        table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
        tokens = self.window_size[0] * self.window_size[1]
        bias_NNH = table[self.relative_position_index.view(-1)].view(tokens, tokens, -1)
        return 16 * bias_NNH.permute(2, 0, 1).contiguous().sigmoid()[None]


class CrossStageCosineWindowAttention(CosineWindowAttention):
    """swin_transformer_v2_cr's windows: CosineWindowAttention with an ordinary projection and another MLP."""

    def packed_qkv(self, x_BNC: Tensor) -> Tensor:
        return self.qkv(x_BNC)

    def bias(self) -> Tensor:
        return self._relative_positional_encodings()


def window_segments(mask_WNN: Tensor, windows: int) -> Tensor:
    """Return each token's region as the number of its first token, for all windows of a batch: (windows, N).

    mask_WNN: 0 between tokens of one region, another value between regions, for the windows of one image.
    """
    regions_WN = (mask_WNN == 0).int().argmax(dim=-1).int()  # int32 takes kernels fewer registers
    return regions_WN.repeat(windows // len(regions_WN), 1)


class GlobalQueryAttention(BackendAttention):
    """GC ViT's windows, whose queries may be those of the whole image."""

    def forward(self, x_BNC: Tensor, q_global: Tensor | None = None) -> Tensor:
        heads = self.num_heads
        if self.use_global and q_global is not None:
            k, v = (split_heads(x, heads) for x in self.qkv(x_BNC).chunk(2, dim=-1))
            # The windows of one image are consecutive. q_global has the shape of a window's tokens.
            tokens = q_global.repeat_interleave(len(x_BNC) // len(q_global), dim=0).reshape(x_BNC.shape)
            q = split_heads(tokens, heads).to(v.dtype)
        else:
            q, k, v = (split_heads(x, heads) for x in self.qkv(x_BNC).chunk(3, dim=-1))
        return self.project(self.attention(q, k, v, self.rel_pos.get_bias(), scale=self.scale))


class MaskedFeatureMapAttention(BackendAttention):
    """timm.layers.Attention2d over feature maps (B, C, height, width)."""

    def forward(self, x_BCHW: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        projected = self.qkv(x_BCHW).flatten(2)
        if self.head_first:
            q, k, v = projected.unflatten(1, (self.num_heads, -1)).chunk(3, dim=2)
        else:
            q, k, v = projected.unflatten(1, (3, self.num_heads, self.dim_head)).unbind(1)
        out_BNE = self.attention(q.mT, k.mT, v.mT, attn_mask)
        return self.project(out_BNE.transpose(1, 2).unflatten(2, x_BCHW.shape[2:]))


class FeatureMapBiasAttention(MaskedFeatureMapAttention):
    """maxxvit's Attention2d: self-attention of feature maps with a relative position bias."""

    def forward(self, x_BCHW: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        return super().forward(x_BCHW, relative_bias(self, shared_rel_pos))


class ChannelsLastBiasAttention(BackendAttention):
    """maxxvit's AttentionCl over the tokens of (B, ..., C)."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        projected_BNF = self.qkv(x).flatten(1, -2)
        if self.head_first:
            q, k, v = split_heads(projected_BNF, self.num_heads).chunk(3, dim=3)
        else:
            qkv_BN3HD = projected_BNF.unflatten(-1, (3, self.num_heads, self.dim_head))
            q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        out_BNE = self.attention(q, k, v, relative_bias(self, shared_rel_pos))
        return self.project(out_BNE.unflatten(1, x.shape[1:-1]))


class WideValueAttention(BackendAttention):
    """The attention of LeViT, TinyViT and EfficientFormer: biases by distance, values of another width than keys."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x) if hasattr(self, "norm") else x  # TinyViT's
        is_map = getattr(self, "use_conv", False)  # (B, C, height, width)
        projected = self.qkv(x)
        projected_BNF = projected.flatten(2).transpose(1, 2) if is_map else projected
        widths = (self.key_dim, self.key_dim, self.val_dim)
        q, k, v = split_heads(projected_BNF, self.num_heads).split(widths, dim=-1)
        out_BNE = self.attention(q, k, v, self.get_attention_biases(x.device), scale=self.scale)
        return self.proj(out_BNE.transpose(1, 2).unflatten(2, x.shape[2:]) if is_map else out_BNE)


class DownsamplingAttention(BackendAttention):
    """LeViT's AttentionDownsample: queries of every second row and column."""

    def forward(self, x: Tensor) -> Tensor:
        is_map = self.use_conv
        q, projected = self.q(x), self.kv(x)
        size = q.shape[2:]
        if is_map:
            q, projected = q.flatten(2).transpose(1, 2), projected.flatten(2).transpose(1, 2)
        k, v = split_heads(projected, self.num_heads).split((self.key_dim, self.val_dim), dim=-1)
        bias = self.get_attention_biases(x.device)
        out_BNE = self.attention(split_heads(q, self.num_heads), k, v, bias, scale=self.scale)
        return self.proj(out_BNE.transpose(1, 2).unflatten(2, size) if is_map else out_BNE)


class CascadedAttention(BackendAttention):
    """EfficientViT (MSRA): heads in sequence, each over its share of the channels and the result of the one before."""

    def forward(self, x_BCHW: Tensor) -> Tensor:
        shares = x_BCHW.chunk(len(self.qkvs), dim=1)
        biases_HNN = self.get_attention_biases(x_BCHW.device)
        results: list[Tensor] = []
        for share, qkv, convolution, bias_NN in zip(shares, self.qkvs, self.dws, biases_HNN, strict=True):
            projected = qkv(share + results[-1] if results else share)
            q, k, v = projected.split((self.key_dim, self.key_dim, self.val_dim), dim=1)
            q, k, v = (y.flatten(2).mT[:, None] for y in (convolution(q), k, v))
            out_BNE = self.attention(q, k, v, bias_NN, scale=self.scale)
            results.append(out_BNE.transpose(1, 2).unflatten(2, x_BCHW.shape[2:]))
        return self.proj(torch.cat(results, dim=1))
