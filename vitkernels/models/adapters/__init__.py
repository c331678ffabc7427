"""An adapter per attention class, chosen by a table: the same module with its attention computed by a backend."""

from typing import Any

from timm.layers import Attention
from torch import nn

from vitkernels.attention import AttentionBackend
from vitkernels.models.adapters.plan import AttentionPlan, attention_plan
from vitkernels.models.adapters.self_attention import SelfAttention
from vitkernels.models.adapters.table import ADAPTERS, REFUSED, class_name
from vitkernels.models.backend_attention import BackendAttention, backend_of, swapped_class

__all__ = [
    "ADAPTERS",
    "REFUSED",
    "AttentionPlan",
    "SelfAttention",
    "adapted",
    "attention_layer",
    "attention_plan",
]


def adapted(module: nn.Module, backend: AttentionBackend) -> BackendAttention:
    """Return the module with its attention computed by `backend`; it shares the module's parameters."""
    adapter: Any
    original: Any
    if isinstance(module, BackendAttention):
        adapter, original = type(module).__bases__[0], module.original
    else:
        adapter, original = ADAPTERS[class_name(module)], type(module)
    return swapped_class(adapter, original, backend).from_module(module)


def attention_layer(attn: str | AttentionBackend) -> type[BackendAttention]:
    """Return the class to pass to timm as `attn_layer`: timm.layers.Attention with a backend, given itself or by name.

    Raises UsageError as `set_attention` does for its argument `attn`.
    """
    return swapped_class(SelfAttention, Attention, backend_of(attn))
