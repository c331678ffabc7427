"""Self-attention with rotary position embeddings: AttentionRope, EvaAttention, SAM's and Gemma 4's.

Shape suffixes: B batch, N tokens, C channels, H heads, D head dim, G key heads.
"""

from timm.models.vision_transformer_sam import get_decomposed_rel_pos_bias
from torch import Tensor, nn

from vitkernels.models.adapters.self_attention import HeadAttention
from vitkernels.models.backend_attention import BackendAttention, joined_bias, split_heads
from vitkernels.models.fused_linear import FusedLinear, joined_linear, linear_with

try:
    from timm.models.gemma4_vit import apply_multidimensional_rope
except ImportError:  # a timm without Gemma 4
    apply_multidimensional_rope = None  # type: ignore[assignment]


class RotaryAttention(HeadAttention):
    """timm.layers.AttentionRope: self-attention with rotary embeddings, separate projections and grouped queries.

    Separate projections of one width run as one product of their joined weights, without their hooks.
    """

    def forward(
        self,
        x_BNC: Tensor,
        rope: Tensor | None = None,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        return self.project(self.attend(x_BNC, attn_mask, is_causal, rope))

    def packed_qkv(self, x_BNC: Tensor) -> Tensor:
        if self.qkv is not None:
            return self.qkv(x_BNC)
        return joined_linear(x_BNC, self.q_proj, self.k_proj, self.v_proj)

    def attend_packed(
        self, qkv_BNF: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, rope: Tensor | None = None
    ) -> Tensor:
        keys = getattr(self, "num_kv_heads", self.num_heads)  # absent before timm 1.0.29
        if keys == self.num_heads:
            return super().attend_packed(qkv_BNF, attn_mask, is_causal, rope)
        qkv_BHND = split_heads(qkv_BNF, self.num_heads + 2 * keys)
        q_BHND, k_BGND, v_BGND = qkv_BHND.split((self.num_heads, keys, keys), dim=1)
        return self.attend_heads(q_BHND, k_BGND, v_BGND, attn_mask, is_causal, rope)


class EvaAttention(RotaryAttention):
    """timm.models.eva.EvaAttention: rotary embeddings; the packed projection has no bias for the keys."""

    def packed_qkv(self, x_BNC: Tensor) -> Tensor:
        return biased_qkv(self, x_BNC) if self.qkv is not None else super().packed_qkv(x_BNC)


def biased_qkv(module: BackendAttention, x_BNC: Tensor) -> Tensor:
    """Return a packed projection whose biases are q_bias and v_bias: (B, N, 3 * E)."""
    bias = joined_bias(module)
    if type(module.qkv) in (nn.Linear, FusedLinear) and not module.qkv_bias_separate:
        return linear_with(module.qkv, x_BNC, module.qkv.weight, bias)
    qkv_BNF = module.qkv(x_BNC)
    return qkv_BNF if bias is None else qkv_BNF + bias


class SamAttention(BackendAttention):
    """vision_transformer_sam's Attention over (B, height, width, C), with a decomposed relative bias or rotary
    embeddings. The bias depends on q, so it is dense.
    """

    def forward(self, x_BHWC: Tensor) -> Tensor:
        B, height, width, _ = x_BHWC.shape
        qkv_BN3HD = self.qkv(x_BHWC.flatten(1, 2)).unflatten(-1, (3, self.num_heads, -1))
        q, k, v = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = rope = None
        if self.use_rel_pos:
            size = (height, width)
            bias = get_decomposed_rel_pos_bias(q.flatten(0, 1), self.rel_pos_h, self.rel_pos_w, size, size)
            bias = bias.unflatten(0, (B, self.num_heads))
        elif self.rope is not None:
            rope = self.rope.get_embed()
        out = self.attention(q.to(v.dtype), k.to(v.dtype), v, bias, scale=self.scale, rope=rope)
        return self.project(out).unflatten(1, (height, width))


class Gemma4Attention(BackendAttention):
    """gemma4_vit's attention: normalized q, k and v, a scale of 1, rotary embeddings per axis, grouped queries."""

    def forward(self, x_BNC: Tensor, rope_cos: Tensor, rope_sin: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (
            norm(proj(x_BNC).unflatten(-1, (-1, self.head_dim)))
            for norm, proj in ((self.q_norm, self.q_proj), (self.k_norm, self.k_proj), (self.v_norm, self.v_proj))
        )
        q, k = (apply_multidimensional_rope(x, rope_cos, rope_sin, ndim=2, unsqueeze_dim=2) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if self.num_kv_groups > 1:
            k, v = (x.repeat_interleave(self.num_kv_groups, dim=1) for x in (k, v))
        out_BNE = self.attention(q.to(v.dtype), k.to(v.dtype), v, attn_mask, scale=1.0)
        return self.proj_drop(self.o_proj(out_BNE))
