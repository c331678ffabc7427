"""A backend as an attention function of Hugging Face transformers, which this module does not import."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError
from vitkernels.models.backend_attention import backend_of

_OTHER_SCORES = ("softcap", "s_aux", "position_bias", "head_mask", "cache")  # keywords that change the result


def transformers_attention(attn: str | AttentionBackend) -> Callable[..., tuple[Tensor, None]]:
    """Return a function to register with transformers' AttentionInterface under any name without "flash" in it.

    It computes what transformers' "sdpa" does: masks as SDPA takes them, causality, grouped queries, dropout. Text
    towers also need a mask function: `AttentionMaskInterface.register(name, sdpa_mask)`.

    A call with a feature that backends do not have, such as softcap, raises UsageError "models.transformers_argument".
    """
    backend = backend_of(attn)

    def attend(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        **others: Any,
    ) -> tuple[Tensor, None]:
        given = [name for name in _OTHER_SCORES if others.get(name) is not None]
        if given:
            message = f"attention backends have no {given[0]}; use transformers' attn_implementation='eager'"
            raise UsageError(message, code="models.transformers_argument", argument=given[0])
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        out_BHND = backend(
            query,
            key,
            value,
            attn_mask=attention_mask,
            is_causal=bool(causal) and attention_mask is None and query.shape[2] > 1,
            scale=scaling,
            dropout_p=dropout,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_BHND.transpose(1, 2).contiguous(), None

    return attend
