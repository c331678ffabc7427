"""Attention modules of timm whose softmax(q kᵀ) v a backend computes, with the same parameters and state-dict keys.

The adapters in `vitkernels.models.adapters` derive from `BackendAttention`, one per class of timm. `swapped_class`
joins an adapter, the class that it replaces and a backend.

Shape suffixes: B batch, N query tokens, M key tokens, H heads, D head dim, E = H * D.
"""

import inspect
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import torch
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn import functional as F

from vitkernels import attention
from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError
from vitkernels.module_swap import instance_sharing_state
from vitkernels.registry.op import say_once

_CLASS_SETTINGS = ("backend", "original")  # attributes of the class, never of an instance


class BackendAttention(nn.Module):
    """First base of a swapped attention module; the second is `original`, the class that it replaces.

    A subclass, the adapter, defines `forward` with the signature of the original and calls `attention` for
    softmax(scale * q kᵀ + bias) v.
    """

    backend: AttentionBackend
    original: type[nn.Module]
    keys_reach_scores = False  # whether the keys of a packed projection reach the scores without a norm or a rotation
    if TYPE_CHECKING:  # attributes of the replaced modules

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """Return why the adapter cannot replace this instance of its class; None if it can."""
        return None

    @classmethod
    def from_module(cls, module: nn.Module) -> Self:
        """Return an instance that shares the parameters, buffers and submodules of `module`."""
        return instance_sharing_state(cls, module, without=_CLASS_SETTINGS)

    def __reduce__(self):
        """Let pickle rebuild the class, which `swapped_class` creates at run time, so no Python module contains it."""
        return _unpickle, (type(self).__bases__[0], self.original, self.backend), self.__dict__

    def __prepare_scriptable__(self) -> nn.Module:
        """Return the module that torch.jit.script compiles instead: timm's own, with the same arithmetic.

        torch.jit.script then leaves that module in the model; a log line says so. Raises UsageError
        "models.torchscript" for a backend with kernels of its own, which TorchScript cannot call.
        """
        name = self.backend.name
        if name not in ("auto", "native", "sdpa"):
            message = (
                f"TorchScript cannot call the attention backend {name!r}: call set_attention(model, 'sdpa') before "
                "torch.jit.script, or use torch.export or torch.compile"
            )
            raise UsageError(message, code="models.torchscript", backend=name)
        scriptable: Any = instance_sharing_state(self.original, self)
        if hasattr(scriptable, "fused_attn"):
            scriptable.fused_attn = name != "native"
        say_once("torch.jit.script puts timm's own attention into the model; call set_attention again to train it")
        return scriptable

    def attention(
        self,
        q_BHND: Tensor,
        k_BHMD: Tensor,
        v_BHMD: Tensor,
        attn_mask: Tensor | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        segment_ids: Tensor | None = None,
        rope: Tensor | None = None,
        rope_half: bool = False,
    ) -> Tensor:
        """Return softmax(scale * q kᵀ + attn_mask) v with the heads joined: (B, N, E).

        If q and k differ in width from v, the narrower ones are padded with zeros, which does not change the scores.

        attn_mask: a bias if it is floating point, otherwise a boolean mask that is True at positions to keep.
        rope, rope_half: see AttentionBackend; only if q, k and v have the same width.
        """
        width, value_width = q_BHND.shape[-1], v_BHMD.shape[-1]
        if value_width > width:
            q_BHND, k_BHMD = (F.pad(x, (0, value_width - width)) for x in (q_BHND, k_BHMD))
        elif value_width < width:
            v_BHMD = F.pad(v_BHMD, (0, width - value_width))
        out_BHND = self.backend(
            q_BHND,
            k_BHMD,
            v_BHMD,
            **self.keywords(attn_mask, is_causal=is_causal),
            segment_ids=segment_ids,
            rope=rope,
            rope_half=rope_half,
            scale=width**-0.5 if scale is None else scale,
        )
        return out_BHND[..., :value_width].transpose(1, 2).flatten(2)

    def keywords(self, attn_mask: Tensor | None, *, is_causal: bool = False) -> dict[str, Any]:
        """Return timm's mask and the module's dropout as keywords of a backend."""
        drop = getattr(self, "attn_drop", None)
        keywords: dict[str, Any] = {
            "is_causal": is_causal,
            "dropout_p": drop.p if drop is not None and self.training else 0.0,
        }
        if attn_mask is not None:
            keywords["bias" if attn_mask.dtype.is_floating_point else "mask"] = attn_mask
        return keywords

    def project(self, out_BNE: Tensor) -> Tensor:
        """Apply the output projection and its dropout."""
        out_BNE = self.proj(out_BNE)
        return self.proj_drop(out_BNE) if hasattr(self, "proj_drop") else out_BNE


def backend_of(attn: Any) -> AttentionBackend:
    """Return the backend; raise UsageError for an unknown name, another type or a backend that cannot run here."""
    if isinstance(attn, str):
        backend: Any = attention.get(attn)
    else:
        backend = attn
    if not isinstance(backend, AttentionBackend):
        given = attn.__name__ + ", a class" if inspect.isclass(attn) else repr(attn)
        raise UsageError(
            f"attn must be the name of a backend or a backend, got {given}; names: {', '.join(attention.names())}",
            code="models.attn_type",
            attn=attn,
            choices=attention.names(),
        )
    reason = backend.unavailable()
    if reason is not None:
        message = f"attention backend {backend.name!r} cannot run on this machine: {reason}"
        raise UsageError(message, code="registry.unavailable", backend=backend.name, reason=reason)
    return backend


@cache  # one class per backend, so torch.compile does not specialize on copied layers
def swapped_class(adapter: Any, original: Any, backend: AttentionBackend) -> type[BackendAttention]:
    """Return a subclass of `original` whose attention `backend` computes.

    adapter: a subclass of BackendAttention.
    """
    name = f"{backend.name.title().replace('_', '')}{original.__name__}"
    swapped = type(name, (adapter, original), {"backend": backend, "original": original})
    register_notrace_module(swapped)  # timm's feature extraction calls the module instead of tracing its arithmetic
    return swapped


def _unpickle(adapter: Any, original: Any, backend: AttentionBackend) -> BackendAttention:
    layer = swapped_class(adapter, original, backend)
    return layer.__new__(layer)


def split_heads(x_BNE: Tensor, heads: int) -> Tensor:
    """(B, N, E) -> (B, H, N, D)."""
    return x_BNE.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined_bias(module: BackendAttention) -> Tensor | None:
    """Return the bias of a packed projection: the module's q_bias and v_bias, and zeros for the keys."""
    if module.q_bias is None:
        return None
    return torch.cat((module.q_bias, module.k_bias, module.v_bias))
