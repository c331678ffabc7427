"""PyTorch operators around the Mosaic-GPU kernels of `pallas_flash` on Hopper, with gradients and fake outputs.

Imported only if the kernels can run, because older JAX lacks the features they need.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

import torch
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels, kernels_for
from vitkernels.attention.pallas_flash.hopper.rotation import fill_rotated
from vitkernels.attention.pallas_flash.hopper.tiles import padded
from vitkernels.attention.pallas_flash.hopper.token_ids import by_queries
from vitkernels.bridge.operator import aligned, differentiable_once, operator

# --- separate q, k, v -------------------------------------------------------------------------------------------------


def _rows_of(*tensors_BHND: Tensor) -> list[Tensor]:
    return [aligned(x.transpose(1, 2)) for x in tensors_BHND]


def _kernels_separate(q: Tensor, k: Tensor, is_causal: bool, scale: float, has_ids: bool) -> AttentionKernels:
    B, H, N, D = q.shape
    return kernels_for(B, H, N, k.shape[2], D, q.dtype, is_causal, scale, False, q.device, has_ids)


@operator(
    "pallas_flash_hopper(Tensor q, Tensor k, Tensor v, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale)"
    " -> (Tensor, Tensor)"
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_spans: Tensor | None,
    k_spans: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N, D), and the scores' log-sum-exp (B, H, padded N) in log2 units for the backward pass.

    q_ids, k_ids: see `token_ids`.
    """
    kernels = _kernels_separate(q, k, is_causal, scale, q_ids is not None)
    q, k, v = _rows_of(q, k, v)
    out, lse = torch.empty_like(q), kernels.vector()
    kernels.forward(q, k, v, *by_queries((q_ids, k_ids, q_spans, k_spans)), out, lse)
    return out.transpose(1, 2), lse


@attend.register_fake
def _(q, k, v, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    B, H, N, _ = q.shape
    return _rows_like(q), q.new_empty(B, H, padded(N), dtype=torch.float32)


def _rows_like(x_BHND: Tensor) -> Tensor:
    B, H, N, D = x_BHND.shape
    return x_BHND.new_empty(B, N, H, D).transpose(1, 2)


@operator(
    "pallas_flash_hopper_backward(Tensor do, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
def attend_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_spans: Tensor | None,
    k_spans: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv."""
    kernels = _kernels_separate(q, k, is_causal, scale, q_ids is not None)
    do, out, q, k, v = _rows_of(do, out, q, k, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    kernels.run_backward(q, k, v, out, lse, do, (q_ids, k_ids, q_spans, k_spans), dq, dk, dv)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


@attend_backward.register_fake
def _(do, out, lse, q, k, v, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    return _rows_like(q), _rows_like(k), _rows_like(v)


def _save(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


@differentiable_once("pallas_flash")
def _differentiate(ctx, do, _dlse):
    if do is None:
        return (None,) * 9
    return *attend_backward(do, *ctx.saved_tensors, ctx.is_causal, ctx.scale), *(None,) * 6


attend.register_autograd(_differentiate, setup_context=_save)


# --- packed qkv -------------------------------------------------------------------------------------------------------


def _kernels_packed(qkv: Tensor, is_causal: bool, scale: float, has_ids: bool) -> AttentionKernels:
    B, N, _, H, D = qkv.shape
    return kernels_for(B, H, N, N, D, qkv.dtype, is_causal, scale, True, qkv.device, has_ids)


@operator(
    "pallas_flash_hopper_packed(Tensor qkv, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale)"
    " -> (Tensor, Tensor)"
)
def attend_packed(
    qkv: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_spans: Tensor | None,
    k_spans: Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Map qkv (B, N, 3, H, D) to out (B, N, H * D) and log-sum-exp (B, H, padded N)."""
    B, N, _, H, D = qkv.shape
    kernels = _kernels_packed(qkv, is_causal, scale, q_ids is not None)
    qkv = aligned(qkv)
    out, lse = qkv.new_empty(B, N, H * D), kernels.vector()
    kernels.forward(qkv, qkv, qkv, *by_queries((q_ids, k_ids, q_spans, k_spans)), out, lse)
    return out, lse


@attend_packed.register_fake
def _(qkv, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H * D), qkv.new_empty(B, H, padded(N), dtype=torch.float32)


@operator(
    "pallas_flash_hopper_packed_backward(Tensor do, Tensor out, Tensor lse, Tensor qkv, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale) -> Tensor"
)
def attend_packed_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    q_ids: Tensor | None,
    k_ids: Tensor | None,
    q_spans: Tensor | None,
    k_spans: Tensor | None,
    is_causal: bool,
    scale: float,
) -> Tensor:
    """Return dqkv (B, N, 3, H, D); the kernels write dq, dk and dv into one array."""
    kernels = _kernels_packed(qkv, is_causal, scale, q_ids is not None)
    qkv, do = aligned(qkv), aligned(do)
    dqkv = torch.empty_like(qkv)
    kernels.run_backward(qkv, qkv, qkv, out, lse, do, (q_ids, k_ids, q_spans, k_spans), dqkv, dqkv, dqkv)
    return dqkv


@attend_packed_backward.register_fake
def _(do, out, lse, qkv, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    return qkv.new_empty(qkv.shape)


def _save_packed(ctx, inputs, output):
    *tensors, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*output, *tensors)
    ctx.set_materialize_grads(False)


@differentiable_once("pallas_flash")
def _differentiate_packed(ctx, do, _dlse):
    if do is None:
        return (None,) * 7
    return attend_packed_backward(do, *ctx.saved_tensors, ctx.is_causal, ctx.scale), *(None,) * 6


attend_packed.register_autograd(_differentiate_packed, setup_context=_save_packed)


# --- packed qkv with rotary embeddings --------------------------------------------------------------------------------
# One operator rotates and attends, so that it owns the packed tensors that the passes over q and k fill: the rotated
# copy, which is saved instead of qkv, and the gradient, which is rotated back in place.


@operator(
    "pallas_flash_hopper_rotary(Tensor qkv, Tensor rope, bool rope_half, "
    "Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale)"
    " -> (Tensor, Tensor, Tensor)"
)
def attend_rotary(qkv: Tensor, rope: Tensor, rope_half: bool, *call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `attend_packed` for rotated q and k, and qkv with them (B, N, 3, H, D).

    rope, rope_half: see AttentionBackend. call: the other arguments of `attend_packed`.
    """
    rotated = qkv.new_empty(qkv.shape)
    fill_rotated(qkv, rotated, rope, rope_half)
    return *attend_packed.function(rotated, *call), rotated


@attend_rotary.register_fake
def _(qkv, rope, rope_half, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    B, N, _, H, D = qkv.shape
    lse = qkv.new_empty(B, H, padded(N), dtype=torch.float32)
    return qkv.new_empty(B, N, H * D), lse, qkv.new_empty(qkv.shape)


@operator(
    "pallas_flash_hopper_rotary_backward(Tensor do, Tensor out, Tensor lse, Tensor rotated, Tensor rope, "
    "bool rope_half, Tensor? q_ids, Tensor? k_ids, Tensor? q_spans, Tensor? k_spans, bool is_causal, float scale)"
    " -> Tensor"
)
def attend_rotary_backward(
    do: Tensor, out: Tensor, lse: Tensor, rotated: Tensor, rope: Tensor, rope_half: bool, *call
) -> Tensor:
    """Return dqkv (B, N, 3, H, D)."""
    dqkv = attend_packed_backward.function(do, out, lse, rotated, *call)
    dq_and_dk = dqkv[:, :, :2]
    fill_rotated(dq_and_dk, dq_and_dk, rope, rope_half, inverse=True)
    return dqkv


@attend_rotary_backward.register_fake
def _(do, out, lse, rotated, rope, rope_half, q_ids, k_ids, q_spans, k_spans, is_causal, scale):
    return rotated.new_empty(rotated.shape)


def _save_rotary(ctx, inputs, output):
    _, rope, ctx.rope_half, *ids, ctx.is_causal, ctx.scale = inputs
    ctx.save_for_backward(*output, rope, *ids)
    ctx.set_materialize_grads(False)


@differentiable_once("pallas_flash")
def _differentiate_rotary(ctx, do, _dlse, _drotated):
    if do is None:
        return (None,) * 9
    saved, ids = ctx.saved_tensors[:4], ctx.saved_tensors[4:]
    return attend_rotary_backward(do, *saved, ctx.rope_half, *ids, ctx.is_causal, ctx.scale), *(None,) * 8


attend_rotary.register_autograd(_differentiate_rotary, setup_context=_save_rotary)
