"""PyTorch operators around the Mosaic-GPU kernels of `pallas_flash` on Hopper, with gradients and fake outputs.

Imported only if the kernels can run, because older JAX lacks the features they need.

The last arguments of each operator describe the call: the bias of `padded_bias`, the ids of `token_ids`, is_causal and
scale. Its backward operator takes them, too, after a flag that says whether the bias needs a gradient; without one, it
returns an empty tensor in its place.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

import torch
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.kernels import AttentionKernels, kernels_for
from vitkernels.attention.pallas_flash.hopper.tiles import padded
from vitkernels.attention.rotation import fill_rotated
from vitkernels.bridge.hopper import can_compile_for
from vitkernels.bridge.operator import aligned, differentiable_once, operator

_CALL = (
    "Tensor? bias, Tensor? q_ids, Tensor? k_ids, Tensor? q_chunks, Tensor? k_chunks, Tensor? used_chunks, "
    "bool is_causal, float scale"
)
_ARGUMENTS = 8  # of a call


def _kernels(B, H, N, M, D, dtype, device, packed: bool, call: tuple) -> AttentionKernels:
    bias, _, _, q_chunks, k_chunks, _, is_causal, scale = call
    of_bias = () if bias is None else (tuple(bias.shape[:2]), bias.dtype)
    chunks = None if q_chunks is None else (q_chunks.shape[1], k_chunks.shape[1])
    return kernels_for(B, H, N, M, D, dtype, is_causal, scale, packed, device, chunks, *of_bias)


def _start(kernels: AttentionKernels, call: tuple, *inputs: Tensor) -> None:
    """Start to compile the kernels of both passes, before the forward pass waits for the first of them.

    Call with the tensors of a call or of its trace, so that a model's kernels compile while torch.compile traces it.
    """
    bias = call[0]
    bias_gradient = bias is not None and bias.requires_grad
    kernels.start(bias_gradient or any(x.requires_grad for x in inputs), bias_gradient)


def _is_known(call: tuple, *inputs: Tensor) -> bool:
    """Return whether a traced call has all that its kernels depend on; a scale may be a symbol, too."""
    return can_compile_for(*inputs, *call[:6]) and isinstance(call[-1], float)


def _vector_length(N, call: tuple):
    """Return the row length of log-sum-exp."""
    q_ids = call[1]
    return padded(N) if q_ids is None else q_ids.shape[1]


def _gradient_or_empty(bias_gradient: Tensor | None, like: Tensor) -> Tensor:
    return like.new_empty(0) if bias_gradient is None else bias_gradient


def _fake_bias_gradient(call: tuple, needed: bool, like: Tensor) -> Tensor:
    return torch.empty_like(call[0]) if needed else like.new_empty(0)


def _save_call(ctx, call: tuple, *saved: Tensor) -> None:
    *tensors, ctx.is_causal, ctx.scale = call
    ctx.save_for_backward(*saved, *tensors)
    ctx.set_materialize_grads(False)


def _saved(ctx) -> tuple[tuple[Tensor, ...], tuple]:
    """Return the tensors of `_save_call`, and the call.

    They are read once: under activation checkpointing, a second reading raises an error.
    """
    tensors = ctx.saved_tensors
    return tensors[:-6], (*tensors[-6:], ctx.is_causal, ctx.scale)


def _needs_bias_gradient(ctx) -> bool:
    return ctx.needs_input_grad[-_ARGUMENTS]


def _gradients(*inputs: Tensor, bias: Tensor, ctx) -> tuple:
    """Return the gradients of an operator's arguments: those of its inputs, then that of its call's bias."""
    return *inputs, bias if _needs_bias_gradient(ctx) else None, *(None,) * (_ARGUMENTS - 1)


# --- separate q, k, v -------------------------------------------------------------------------------------------------


def _rows_of(*tensors_BHND: Tensor) -> list[Tensor]:
    return [aligned(x.transpose(1, 2)) for x in tensors_BHND]


def _kernels_separate(q: Tensor, k: Tensor, call: tuple) -> AttentionKernels:
    B, H, N, D = q.shape
    return _kernels(B, H, N, k.shape[2], D, q.dtype, q.device, False, call)


@operator(f"pallas_flash_hopper(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)")
def attend(q: Tensor, k: Tensor, v: Tensor, *call) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N, D), and the scores' log-sum-exp (B, H, padded N) in log2 units for the backward pass."""
    kernels = _kernels_separate(q, k, call)
    _start(kernels, call, q, k, v)
    q, k, v = _rows_of(q, k, v)
    out, lse = torch.empty_like(q), kernels.vector()
    kernels.run_forward(q, k, v, call[0], call[1:6], out, lse)
    return out.transpose(1, 2), lse


@attend.register_fake
def _(q, k, v, *call):
    if _is_known(call, q, k, v):
        _start(_kernels_separate(q, k, call), call, q, k, v)
    B, H, N, _ = q.shape
    return _rows_like(q), q.new_empty(B, H, _vector_length(N, call), dtype=torch.float32)


def _rows_like(x_BHND: Tensor) -> Tensor:
    B, H, N, D = x_BHND.shape
    return x_BHND.new_empty(B, N, H, D).transpose(1, 2)


@operator(
    "pallas_flash_hopper_backward(Tensor do, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"bool bias_gradient, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def attend_backward(
    do: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_gradient: bool, *call
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the bias."""
    kernels = _kernels_separate(q, k, call)
    do, out, q, k, v = _rows_of(do, out, q, k, v)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    dbias = kernels.run_backward(q, k, v, out, lse, do, call[0], call[1:6], dq, dk, dv, bias_gradient)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2), _gradient_or_empty(dbias, q)


@attend_backward.register_fake
def _(do, out, lse, q, k, v, bias_gradient, *call):
    return _rows_like(q), _rows_like(k), _rows_like(v), _fake_bias_gradient(call, bias_gradient, q)


def _save(ctx, inputs, output):
    q, k, v, *call = inputs
    _save_call(ctx, call, *output, q, k, v)


@differentiable_once("pallas_flash")
def _differentiate(ctx, do, _dlse):
    if do is None:
        return (None,) * (3 + _ARGUMENTS)
    saved, call = _saved(ctx)
    *dqkv, dbias = attend_backward(do, *saved, _needs_bias_gradient(ctx), *call)
    return _gradients(*dqkv, bias=dbias, ctx=ctx)


attend.register_autograd(_differentiate, setup_context=_save)


# --- packed qkv -------------------------------------------------------------------------------------------------------


def _kernels_packed(qkv: Tensor, call: tuple) -> AttentionKernels:
    B, N, _, H, D = qkv.shape
    return _kernels(B, H, N, N, D, qkv.dtype, qkv.device, True, call)


@operator(f"pallas_flash_hopper_packed(Tensor qkv, {_CALL}) -> (Tensor, Tensor)")
def attend_packed(qkv: Tensor, *call) -> tuple[Tensor, Tensor]:
    """Map qkv (B, N, 3, H, D) to out (B, N, H * D) and log-sum-exp (B, H, padded N)."""
    B, N, _, H, D = qkv.shape
    kernels = _kernels_packed(qkv, call)
    _start(kernels, call, qkv)
    qkv = aligned(qkv)
    out, lse = qkv.new_empty(B, N, H * D), kernels.vector()
    kernels.run_forward(qkv, qkv, qkv, call[0], call[1:6], out, lse)
    return out, lse


@attend_packed.register_fake
def _(qkv, *call):
    if _is_known(call, qkv):
        _start(_kernels_packed(qkv, call), call, qkv)
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H * D), qkv.new_empty(B, H, _vector_length(N, call), dtype=torch.float32)


@operator(
    "pallas_flash_hopper_packed_backward(Tensor do, Tensor out, Tensor lse, Tensor qkv, "
    f"bool bias_gradient, {_CALL}) -> (Tensor, Tensor)"
)
def attend_packed_backward(
    do: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, bias_gradient: bool, *call
) -> tuple[Tensor, Tensor]:
    """Return dqkv (B, N, 3, H, D), one array into which the kernels write dq, dk and dv, and the bias's gradient."""
    kernels = _kernels_packed(qkv, call)
    qkv, do = aligned(qkv), aligned(do)
    dqkv = torch.empty_like(qkv)
    dbias = kernels.run_backward(
        qkv, qkv, qkv, out, lse, do, call[0], call[1:6], dqkv, dqkv, dqkv, bias_gradient
    )  # fmt: skip
    return dqkv, _gradient_or_empty(dbias, qkv)


@attend_packed_backward.register_fake
def _(do, out, lse, qkv, bias_gradient, *call):
    return qkv.new_empty(qkv.shape), _fake_bias_gradient(call, bias_gradient, qkv)


def _save_packed(ctx, inputs, output):
    qkv, *call = inputs
    _save_call(ctx, call, *output, qkv)


@differentiable_once("pallas_flash")
def _differentiate_packed(ctx, do, _dlse):
    if do is None:
        return (None,) * (1 + _ARGUMENTS)
    saved, call = _saved(ctx)
    dqkv, dbias = attend_packed_backward(do, *saved, _needs_bias_gradient(ctx), *call)
    return _gradients(dqkv, bias=dbias, ctx=ctx)


attend_packed.register_autograd(_differentiate_packed, setup_context=_save_packed)


# --- packed qkv with rotary embeddings --------------------------------------------------------------------------------
# One operator rotates and attends, so that it owns the packed tensors that the rotation fills: the rotated copy, which
# is saved instead of qkv, and the gradient, which is rotated back in place.


@operator(f"pallas_flash_hopper_rotary(Tensor qkv, Tensor rope, bool rope_half, {_CALL}) -> (Tensor, Tensor, Tensor)")
def attend_rotary(qkv: Tensor, rope: Tensor, rope_half: bool, *call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `attend_packed` for rotated q and k, and the packed tensor with these (B, N, 3, H, D).

    rope, rope_half: see AttentionBackend.
    """
    _start(_kernels_packed(qkv, call), call, qkv)
    rotated = qkv.new_empty(qkv.shape)
    fill_rotated(qkv, rotated, rope, rope_half)
    return *attend_packed.function(rotated, *call), rotated


@attend_rotary.register_fake
def _(qkv, rope, rope_half, *call):
    if _is_known(call, qkv):
        _start(_kernels_packed(qkv, call), call, qkv)
    B, N, _, H, D = qkv.shape
    lse = qkv.new_empty(B, H, _vector_length(N, call), dtype=torch.float32)
    return qkv.new_empty(B, N, H * D), lse, qkv.new_empty(qkv.shape)


@operator(
    "pallas_flash_hopper_rotary_backward(Tensor do, Tensor out, Tensor lse, Tensor rotated, Tensor rope, "
    f"bool rope_half, bool bias_gradient, {_CALL}) -> (Tensor, Tensor)"
)
def attend_rotary_backward(
    do: Tensor, out: Tensor, lse: Tensor, rotated: Tensor, rope: Tensor, rope_half: bool, bias_gradient: bool, *call
) -> tuple[Tensor, Tensor]:
    """Return dqkv (B, N, 3, H, D) and the bias's gradient."""
    dqkv, dbias = attend_packed_backward.function(do, out, lse, rotated, bias_gradient, *call)
    dq_and_dk = dqkv[:, :, :2]
    fill_rotated(dq_and_dk, dq_and_dk, rope, rope_half, inverse=True)
    return dqkv, dbias


@attend_rotary_backward.register_fake
def _(do, out, lse, rotated, rope, rope_half, bias_gradient, *call):
    return rotated.new_empty(rotated.shape), _fake_bias_gradient(call, bias_gradient, rotated)


def _save_rotary(ctx, inputs, output):
    _, rope, ctx.rope_half, *call = inputs
    _save_call(ctx, call, *output, rope)


@differentiable_once("pallas_flash")
def _differentiate_rotary(ctx, do, _dlse, _drotated):
    if do is None:
        return (None,) * (3 + _ARGUMENTS)
    saved, call = _saved(ctx)
    dqkv, dbias = attend_rotary_backward(do, *saved, ctx.rope_half, _needs_bias_gradient(ctx), *call)
    return _gradients(dqkv, None, None, bias=dbias, ctx=ctx)


attend_rotary.register_autograd(_differentiate_rotary, setup_context=_save_rotary)
