"""Flash attention for vision transformers on TPUs, for JAX programs: the kernels of `pallas_flash`.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, E = H * D, 3 = q, k, v.
"""

import jax
import jax.numpy as jnp

from vitkernels.attention.pallas_flash.tpu import dispatch
from vitkernels.errors import UsageError
from vitkernels.jax.devices import chip
from vitkernels.jax.differentiable import differentiable

_attend = differentiable(dispatch.attend, dispatch.attend_vjp)
_DTYPES = ("bfloat16", "float32")


def attention(
    q_BNHD: jax.Array,
    k_BMHD: jax.Array,
    v_BMHD: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Return attention (B, N, H, D), as jax.nn.dot_product_attention computes it.

    Args:
        bias: (B or 1, H or 1, N or 1, M or 1), added to the scaled scores; has a gradient.
        mask: boolean of such a shape, True where attention is allowed.
        segment_ids: int32 (B, N); tokens attend to tokens of their segment only. Needs N = M.
        scale: of the scores; D**-0.5 by default.

    Every number of tokens works. Raises UsageError (code jax.attention) for unsupported shapes and dtypes; supported
    are bfloat16 and float32, and head dims up to 128 in steps of 8.
    """
    if q_BNHD.ndim != 4 or k_BMHD.shape != v_BMHD.shape or k_BMHD.ndim != 4:
        shapes = f"q {q_BNHD.shape}, k {k_BMHD.shape}, v {v_BMHD.shape}"
        raise UsageError(f"expected (batch, tokens, heads, head dim); got {shapes}", code="jax.attention")
    B, N, H, D = q_BNHD.shape
    arrays = [x.reshape(B, -1, H * D) for x in (q_BNHD, k_BMHD, v_BMHD)]
    return _checked(arrays, H, D, bias, mask, segment_ids, is_causal, scale).reshape(B, N, H, D)


def attention_qkvpacked(
    qkv_BN3HD: jax.Array,
    *,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    segment_ids: jax.Array | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> jax.Array:
    """Return attention (B, N, H, D) of a packed projection (B, N, 3, H, D), which is read without copies.

    The other arguments and the errors are those of `attention`.
    """
    if qkv_BN3HD.ndim != 5 or qkv_BN3HD.shape[2] != 3:
        message = f"expected (batch, tokens, 3, heads, head dim); got {qkv_BN3HD.shape}"
        raise UsageError(message, code="jax.attention")
    B, N, _, H, D = qkv_BN3HD.shape
    arrays = [qkv_BN3HD.reshape(B, N, 3 * H * D)]
    return _checked(arrays, H, D, bias, mask, segment_ids, is_causal, scale).reshape(B, N, H, D)


def _checked(arrays, heads, head_dim, bias, mask, segment_ids, is_causal, scale) -> jax.Array:
    if head_dim % 8 or not 8 <= head_dim <= 128:
        message = f"head dims up to 128 in steps of 8 are supported, not {head_dim}"
        raise UsageError(message, code="jax.attention", head_dim=head_dim)
    dtypes = {x.dtype.name for x in arrays}
    if len(dtypes) > 1 or not dtypes <= set(_DTYPES):
        message = f"q, k and v must share one of the dtypes {', '.join(_DTYPES)}; got {', '.join(sorted(dtypes))}"
        raise UsageError(message, code="jax.attention", dtypes=sorted(dtypes))
    extras = {
        "bias": None if bias is None else _four_axes(bias),
        "mask": None if mask is None else _four_axes(mask.astype(bool)),
        # A single token attends to itself, whatever its segment.
        "segment_ids": None if segment_ids is None or segment_ids.shape[1] == 1 else segment_ids.astype(jnp.int32),
    }
    given = {name: x for name, x in extras.items() if x is not None}
    outputs = _attend(
        *arrays,
        *given.values(),
        heads=heads,
        scale=head_dim**-0.5 if scale is None else float(scale),
        is_causal=is_causal,
        extras=tuple(given),
        bias_gradient=bias is not None,
        chip=chip(),
    )
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def _four_axes(x: jax.Array) -> jax.Array:
    x = x[(None,) * (4 - x.ndim)]
    return x if x.dtype in (jnp.bool_, jnp.float32, jnp.bfloat16) else x.astype(jnp.float32)
