"""An attention call without its data, and the checks of a call's arguments.

Shape suffixes: B batch, H heads, N query tokens, M key and value tokens, D head dim.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from vitkernels.attention.sdpa_names import bias_and_mask, repeated_heads
from vitkernels.autocast import dtype_of
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class Problem:
    """Describe one attention call without its data: everything that decides whether a backend supports it."""

    batch: int
    heads: int
    q_tokens: int
    kv_tokens: int
    head_dim: int
    dtype: torch.dtype
    device_type: str
    bias_shape: tuple[int, ...] | None = None
    has_mask: bool = False
    has_segment_ids: bool = False
    is_causal: bool = False
    dropout_p: float = 0.0
    has_rope: bool = False
    mask_shape: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        q_BHND: Tensor,
        k_BHMD: Tensor,
        v_BHMD: Tensor,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        segment_ids: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,  # accepted like a call's other arguments, but unused: backends support any scale
        dropout_p: float = 0.0,
        rope: Tensor | None = None,
        rope_half: bool = False,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> "Problem":
        """Return the problem of a call with these arguments; raise UsageError if they are inconsistent."""
        if attn_mask is not None:
            bias, mask = bias_and_mask(attn_mask, bias, mask)
        if enable_gqa:
            k_BHMD, v_BHMD = repeated_heads(q_BHND, k_BHMD, v_BHMD)
        _check(q_BHND, k_BHMD, v_BHMD, bias, mask, segment_ids, is_causal, dropout_p, rope)
        B, H, N, D = q_BHND.shape
        return cls(
            batch=B,
            heads=H,
            q_tokens=N,
            kv_tokens=k_BHMD.shape[2],
            head_dim=D,
            dtype=dtype_of(q_BHND),
            device_type=q_BHND.device.type,
            bias_shape=None if bias is None else tuple(bias.shape),
            has_mask=mask is not None,
            has_segment_ids=segment_ids is not None,
            is_causal=is_causal,
            dropout_p=dropout_p,
            has_rope=rope is not None,
            mask_shape=None if mask is None else tuple(mask.shape),
        )


def _check(q, k, v, bias, mask, segment_ids, is_causal, dropout_p, rope) -> None:
    extras = {"bias": bias, "mask": mask, "segment_ids": segment_ids, "rope": rope}
    check_tensors(q=q, k=k, v=v, **extras)
    scores = _check_qkv(q, k, v)
    for name, x in {"k": k, "v": v, **extras}.items():
        if x is not None and x.device != q.device:
            message = f"{name} is on {x.device}, q on {q.device}; move them to one device"
            raise UsageError(message, code="attention.device", name=name)
    if bias is not None:
        if not bias.dtype.is_floating_point:
            message = f"bias must be floating, got {bias.dtype}; pass a boolean keep-mask as mask="
            raise UsageError(message, code="attention.dtype", name="bias")
        _check_broadcast("bias", bias, scores)
    if mask is not None:
        if mask.dtype != torch.bool:
            message = f"mask must be boolean (True keeps), got {mask.dtype}; pass an additive mask as bias="
            raise UsageError(message, code="attention.dtype", name="mask")
        _check_broadcast("mask", mask, scores)
    if segment_ids is not None:
        _check_segment_ids(segment_ids, scores)
    if rope is not None:
        _check_rope(rope, scores, q.shape[3])
    if type(is_causal) not in (bool, torch.SymBool):  # kernels disagree on the truth of other values
        raise UsageError(f"is_causal must be True or False, got {is_causal!r}", code="attention.is_causal")
    if not isinstance(dropout_p, (int, float, torch.SymFloat)) or not 0.0 <= dropout_p < 1.0:
        message = f"dropout_p must be a number of at least 0 and less than 1, got {dropout_p!r}"
        raise UsageError(message, code="attention.dropout_p", dropout_p=dropout_p)


def check_tensors(**given) -> None:
    """Raise UsageError for an argument that must be a tensor and is none."""
    for name, x in given.items():
        if not isinstance(x, Tensor) and (x is not None or name in ("q", "k", "v", "qkv")):
            hint = "convert it with torch.as_tensor"
            if x is None:
                hint = "pass a tensor"
            elif isinstance(x, (bool, int, float)):
                hint = "pass dropout_p=, is_causal= and scale= by name: their order differs from SDPA's"
            message = f"{name} must be a torch tensor, got {type(x).__name__}; {hint}"
            raise UsageError(message, code="attention.type", name=name)


def _check_qkv(q, k, v) -> tuple[int, int, int, int]:
    """Return the shape of the scores, (B, H, N, M)."""
    if not q.ndim == k.ndim == v.ndim == 4:
        raise _shape_error("q, k and v must have 4 dimensions (batch, heads, tokens, head dim)", q, k, v)
    B, H, N, D = q.shape
    M = k.shape[2]
    if k.shape != (B, H, M, D) or v.shape != (B, H, M, D):
        expected = "k and v must have q's batch size, heads and head dim, and the same number of tokens as each other"
        raise _shape_error(expected, q, k, v)
    if D == 0:
        raise _shape_error("the head dim must be at least 1", q, k, v)
    is_floating = q.dtype.is_floating_point and q.dtype.itemsize > 1  # 8-bit floats are storage formats
    if not dtype_of(q) == dtype_of(k) == dtype_of(v) or not is_floating:
        message = f"q, k and v must share one floating dtype of 16 bits or more; got {q.dtype}, {k.dtype} and {v.dtype}"
        raise UsageError(message, code="attention.dtype", name="q")
    return B, H, N, M


def _shape_error(expected: str, q: Tensor, k: Tensor, v: Tensor) -> UsageError:
    shapes = {"q": tuple(q.shape), "k": tuple(k.shape), "v": tuple(v.shape)}
    got = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    return UsageError(f"{expected}; got {got}", code="attention.shape", **shapes)


def _check_segment_ids(segment_ids: Tensor, scores: tuple[int, ...]) -> None:
    B, _, N, M = scores
    is_integer = not (segment_ids.dtype.is_floating_point or segment_ids.dtype.is_complex)
    if not is_integer or segment_ids.shape != (B, N) or N != M:
        raise UsageError(
            "segment_ids must be integers of shape (batch, tokens), in self-attention; "
            f"got {segment_ids.dtype} {tuple(segment_ids.shape)} for {N} queries and {M} keys of batch size {B}",
            code="attention.segment_ids",
            shape=tuple(segment_ids.shape),
            dtype=segment_ids.dtype,
        )


def _check_rope(rope: Tensor, scores: tuple[int, ...], head_dim: int) -> None:
    B, H, N, M = scores
    fits = 2 <= rope.ndim <= 4 and rope.shape[-1] == 2 * head_dim and rope.shape[-2] <= N == M and head_dim % 2 == 0
    leading = (1,) * (4 - rope.ndim) + tuple(rope.shape[:-2])
    if not fits or not rope.dtype.is_floating_point or leading[0] not in (1, B) or leading[1] not in (1, H):
        raise UsageError(
            "rope must be floating, the sines and then the cosines of the last tokens, in self-attention with an even "
            f"head dim: (batch or 1, heads or 1, at most {N}, 2 * {head_dim}); "
            f"got {rope.dtype} {tuple(rope.shape)} for {N} queries and {M} keys",
            code="attention.rope",
            shape=tuple(rope.shape),
            dtype=rope.dtype,
        )


def _check_broadcast(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    first = len(shape) - x.ndim
    fits = 1 <= x.ndim <= len(shape) and all(x.shape[i] in (1, shape[first + i]) for i in range(x.ndim))
    if not fits:
        message = f"{name} must broadcast to (batch, heads, queries, keys) = {shape}, got {tuple(x.shape)}"
        raise UsageError(message, code="attention.broadcast", name=name, shape=tuple(x.shape))


def scale_of(scale) -> float:
    """Return scale as a float; raise UsageError if it has a gradient or is not one number."""
    if isinstance(scale, Tensor) and scale.requires_grad and torch.is_grad_enabled():
        message = "scale must be a number without a gradient: pass scale=1.0, and q * scale as q"
        raise UsageError(message, code="attention.scale_gradient")
    try:
        return float(scale)
    except (TypeError, ValueError, RuntimeError):
        got = f"a tensor of shape {tuple(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
        message = f"scale must be one number, got {got}; to scale per head or row, pass scale=1.0, and q * scale as q"
        raise UsageError(message, code="attention.scale") from None
