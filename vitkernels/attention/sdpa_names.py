"""Accept the arguments of torch's scaled_dot_product_attention that have other names here: attn_mask and enable_gqa."""

from torch import Tensor

from vitkernels.errors import UsageError


def bias_and_mask(attn_mask: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return SDPA's attn_mask as `bias` if it is floating, as `mask` (True keeps) if it is boolean.

    Raises UsageError "attention.attn_mask" if bias or mask is also given, because attn_mask is another name for them.
    """
    if bias is not None or mask is not None:
        other = "mask" if bias is None else "bias"
        message = (
            f"attn_mask and {other} are two names of one argument; pass one, or an additive bias= and a boolean mask="
        )
        raise UsageError(message, code="attention.attn_mask", other=other)
    is_floating = isinstance(attn_mask, Tensor) and attn_mask.dtype.is_floating_point
    return (attn_mask, None) if is_floating else (None, attn_mask)


def repeated_heads(q_BHND: Tensor, k_BGMD: Tensor, v_BGMD: Tensor) -> tuple[Tensor, Tensor]:
    """Return keys and values of G heads repeated to the H heads of q, as SDPA's enable_gqa does. They are copies.

    Raises UsageError "attention.enable_gqa" if G does not divide H.
    """
    if not q_BHND.ndim == k_BGMD.ndim == v_BGMD.ndim == 4:
        return k_BGMD, v_BGMD  # the checks of the call name the shapes
    heads, groups = q_BHND.shape[1], k_BGMD.shape[1]
    if k_BGMD.shape[1] != v_BGMD.shape[1] or not groups or heads % groups:
        message = (
            f"enable_gqa=True needs key and value heads that divide the query heads; got {heads} query heads, {groups} "
            f"key heads and {v_BGMD.shape[1]} value heads"
        )
        raise UsageError(message, code="attention.enable_gqa", heads=heads, groups=groups)
    if groups == heads:
        return k_BGMD, v_BGMD
    return k_BGMD.repeat_interleave(heads // groups, dim=1), v_BGMD.repeat_interleave(heads // groups, dim=1)
