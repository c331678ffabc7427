"""timm's self-attention module with an attention backend: same parameters and state-dict keys.

Shape suffixes: B batch, N tokens, C channels, H heads, D head dim, E = H * D, 3 = q, k, v.
"""

from functools import cache

from timm.layers import Attention
from torch import Tensor, nn

from vitkernels.attention import AttentionBackend
from vitkernels.module_swap import instance_sharing_state


class BackendAttention(Attention):
    """timm.layers.Attention whose softmax(q kᵀ) v is computed by `self.backend`."""

    backend: AttentionBackend

    @classmethod
    def from_module(cls, module: Attention) -> "BackendAttention":
        """Return an instance that shares the parameters, buffers and submodules of `module`."""
        return instance_sharing_state(cls, module, without=("backend",))

    def __reduce__(self):
        """Let pickle rebuild the class, which `attention_layer` makes at run time and no module holds by name."""
        return _unpickle, (self.backend,), self.__dict__

    def forward(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        return self.proj_drop(self.proj(self.attend(x_BNC, attn_mask, is_causal)))

    def attend(self, x_BNC: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return attention's result before the output projection: (B, N, C) -> (B, N, E).

        attn_mask: a bias if it is floating point, otherwise a boolean mask that is True at positions to keep.
        """
        return self._gated(x_BNC, self.attend_packed(self.qkv(x_BNC), attn_mask, is_causal))

    def attend_packed(self, qkv_BNF: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the result of `attend`, without its gate, from the projection's output: (B, N, 3 * E) -> (B, N, E)."""
        qkv_BN3HD = qkv_BNF.unflatten(-1, (3, self.num_heads, self.head_dim))
        keywords = {
            "is_causal": is_causal,
            "scale": self.scale,
            "dropout_p": self.attn_drop.p if self.training else 0.0,
        }
        if attn_mask is not None:
            keywords["bias" if attn_mask.dtype.is_floating_point else "mask"] = attn_mask
        if isinstance(self.q_norm, nn.Identity) and isinstance(self.k_norm, nn.Identity):
            out_BNE = self.backend.qkvpacked(qkv_BN3HD, **keywords)
        else:
            q_BHND, k_BHND, v_BHND = qkv_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
            # Under autocast the norms return float32; backends expect one dtype.
            q_BHND, k_BHND = self.q_norm(q_BHND).to(v_BHND.dtype), self.k_norm(k_BHND).to(v_BHND.dtype)
            out_BNE = self.backend(q_BHND, k_BHND, v_BHND, **keywords).transpose(1, 2).flatten(2)
        return self.norm(out_BNE)

    @property
    def has_gate(self) -> bool:
        """Return whether the result is multiplied by a gate of the input."""
        return getattr(self, "gate", None) is not None  # absent before timm 1.0.30

    def _gated(self, x_BNC: Tensor, out_BNE: Tensor) -> Tensor:
        gate = getattr(self, "gate", None)
        return out_BNE if gate is None else out_BNE * gate(x_BNC).sigmoid()


@cache  # one class per backend, so torch.compile does not specialize on copied layers
def attention_layer(backend: AttentionBackend) -> type[BackendAttention]:
    """Return the class to pass to timm as `attn_layer`."""
    return type(f"{backend.name.title().replace('_', '')}Attention", (BackendAttention,), {"backend": backend})


def _unpickle(backend: AttentionBackend) -> BackendAttention:
    layer = attention_layer(backend)
    return layer.__new__(layer)
