"""PyTorch operators around the flash-attention kernels: opaque to torch.compile, with gradients and fake outputs.

The last arguments of each operator describe the call: the bias and mask of `padded_keys`, segment_ids, is_causal, a
positive scale, the requested tiles, and the result of `tiles_of_call`. Its backward operator takes them, too, after a
flag that says whether the bias needs a gradient; without one, it returns an empty tensor in its place.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkernels.attention.rotation import fill_rotated
from vitkernels.attention.triton_flash.inputs import FlashInputs, statistics_shape
from vitkernels.attention.triton_flash.launch import backward, forward
from vitkernels.bridge.operator import BoundedCache, aligned, differentiable_once, interpretable, operator

_CALL = (
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, int[] tiles, Tensor? segment_tiles"
)
_ARGUMENTS = 7  # of a call


def _views(packed_BN3HD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_BHND, k_BHND, v_BHND = packed_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    return q_BHND, k_BHND, v_BHND


def _inputs(q, k, v, call: tuple) -> FlashInputs:
    bias, mask, segment_ids, is_causal, scale, _, segment_tiles = call
    q, k, v, bias = (interpretable(x) for x in (q, k, v, bias))
    return FlashInputs.of(q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles)


def _tiles(call: tuple) -> Sequence[int]:
    return call[5]


def _bias_gradient(call: tuple, gradient: Tensor | None, like: Tensor) -> Tensor:
    """Return the gradient in the bias's shape and dtype; an empty tensor if it was not needed."""
    return like.new_empty(0) if gradient is None else gradient.view(call[0].shape).to(call[0].dtype)


def _fake_bias_gradient(call: tuple, needed: bool, like: Tensor) -> Tensor:
    return torch.empty_like(call[0], memory_format=torch.contiguous_format) if needed else like.new_empty(0)


def _save_call(ctx, call: tuple, *saved: Tensor) -> None:
    bias, mask, segment_ids, ctx.is_causal, ctx.scale, ctx.tiles, segment_tiles = call
    ctx.save_for_backward(*saved, bias, mask, segment_ids, segment_tiles)
    ctx.set_materialize_grads(False)


def _saved(ctx) -> tuple[list[Tensor], tuple]:
    """Return the tensors of `_save_call`, and the call.

    They are read once: under activation checkpointing, a second reading raises an error.
    """
    *saved, bias, mask, segment_ids, segment_tiles = ctx.saved_tensors
    return saved, (bias, mask, segment_ids, ctx.is_causal, ctx.scale, ctx.tiles, segment_tiles)


def _needs_bias_gradient(ctx) -> bool:
    return ctx.needs_input_grad[-_ARGUMENTS]


def _gradients(*inputs: Tensor | None, bias: Tensor, ctx) -> tuple:
    """Return the gradients of an operator's arguments: those of its inputs, then that of its call's bias."""
    return *inputs, bias if _needs_bias_gradient(ctx) else None, *(None,) * (_ARGUMENTS - 1)


def _rows_like(x_BHND: Tensor) -> Tensor:
    """Return a new (B, H, N, D) tensor with (B, N, H, D) memory layout, which projections read and write."""
    B, H, N, D = x_BHND.shape
    return x_BHND.new_empty(B, N, H, D).transpose(1, 2)


# --- separate q, k, v -------------------------------------------------------------------------------------------------


@operator(f"triton_flash(Tensor q, Tensor k, Tensor v, {_CALL}) -> (Tensor, Tensor)")
def attend(q: Tensor, k: Tensor, v: Tensor, *call) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N, D), and the scores' log-sum-exp for the backward pass; see forward_kernel."""
    inputs = _inputs(q, k, v, call)
    out_BHND = _rows_like(inputs.q)
    lse_BHN = inputs.new_statistics()
    forward(inputs, out_BHND, lse_BHN, _tiles(call))
    return out_BHND.to(q.dtype), lse_BHN


@attend.register_fake
def _(q, k, v, *call):
    return _rows_like(q), q.new_empty(statistics_shape(q, call[0]), dtype=torch.float32)


@operator(
    "triton_flash_backward(Tensor do, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    f"bool bias_gradient, {_CALL}) -> (Tensor, Tensor, Tensor, Tensor)"
)
def attend_backward(
    do: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, bias_gradient: bool, *call
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the bias."""
    inputs = _inputs(q, k, v, call)
    out, do = interpretable(out), interpretable(do)
    dq, dk, dv = (_rows_like(x) for x in (inputs.q, inputs.k, inputs.v))
    bias_shape = tuple(call[0].shape) if bias_gradient else None
    dbias, _ = backward(inputs, out, lse, do, (dq, dk, dv), _tiles(call), bias_shape)
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), _bias_gradient(call, dbias, q)


@attend_backward.register_fake
def _(do, out, lse, q, k, v, bias_gradient, *call):
    return _rows_like(q), _rows_like(k), _rows_like(v), _fake_bias_gradient(call, bias_gradient, q)


def _save(ctx, inputs, output):
    q, k, v, *call = inputs
    _save_call(ctx, call, *output, q, k, v)


@differentiable_once("triton_flash")
def _differentiate(ctx, do, _dlse):
    if do is None:
        return (None,) * (3 + _ARGUMENTS)
    saved, call = _saved(ctx)
    *dqkv, dbias = attend_backward(do, *saved, _needs_bias_gradient(ctx), *call)
    return _gradients(*dqkv, bias=dbias, ctx=ctx)


attend.register_autograd(_differentiate, setup_context=_save)


# --- packed qkv -------------------------------------------------------------------------------------------------------
# Creating and inspecting views of q, k and v takes longer than a launch, so a plain call with a known layout launches
# directly with addresses.

_NO_EXTRAS = (None,) * 4
_forward_launches, _backward_launches = BoundedCache(), BoundedCache()  # layout of a plain call -> its launches


def _layout(qkv: Tensor, call: tuple) -> tuple | None:
    """Return everything the launches of a plain call on the current GPU depend on; None for any other call."""
    *extras, is_causal, scale, tiles, _ = call
    if any(x is not None for x in extras) or not qkv.is_cuda or not qkv.numel():
        return None
    device = qkv.get_device()
    if device != torch.cuda.current_device():
        return None
    return qkv.shape, qkv.stride(), qkv.dtype, device, qkv.data_ptr() % 16, is_causal, scale, tuple(tiles)


def _remember(cache: BoundedCache, layout: tuple | None, inputs: FlashInputs, qkv: Tensor, launches: list) -> None:
    copied = tuple(x.data_ptr() for x in (inputs.q, inputs.k, inputs.v)) != _addresses(qkv)
    if layout is not None and not copied and None not in launches:  # None: interpreted
        cache[layout] = launches


def _addresses(qkv_BN3HD: Tensor) -> tuple[int, int, int]:
    q, step = qkv_BN3HD.data_ptr(), qkv_BN3HD.stride(2) * qkv_BN3HD.element_size()
    return q, q + step, q + 2 * step


@operator(f"triton_flash_packed(Tensor qkv, {_CALL}) -> (Tensor, Tensor)")
def attend_packed(qkv: Tensor, *call) -> tuple[Tensor, Tensor]:
    """Map qkv (B, N, 3, H, D) to out (B, N, H * D) and log-sum-exp; see forward_kernel."""
    B, N, _, H, D = qkv.shape
    layout = _layout(qkv, call)
    given = interpretable(qkv)
    out_BNE = given.new_empty(B, N, H * D)
    launches = _forward_launches.get(layout)
    if launches is not None:
        lse_BHN = given.new_empty(B, H, N, dtype=torch.float32)
        launches[0](*_addresses(qkv), out_BNE.data_ptr(), lse_BHN.data_ptr(), *_NO_EXTRAS)
        return out_BNE, lse_BHN
    inputs = _inputs(*_views(given), call)
    lse_BHN = inputs.new_statistics()
    launch = forward(inputs, out_BNE.view(B, N, H, D).transpose(1, 2), lse_BHN, _tiles(call))
    _remember(_forward_launches, layout, inputs, qkv, [launch])
    return out_BNE.to(qkv.dtype), lse_BHN


@attend_packed.register_fake
def _(qkv, *call):
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H * D), qkv.new_empty(statistics_shape(_views(qkv)[0], call[0]), dtype=torch.float32)


@operator(
    "triton_flash_packed_backward(Tensor do, Tensor out, Tensor lse, Tensor qkv, "
    f"bool bias_gradient, {_CALL}) -> (Tensor, Tensor)"
)
def attend_packed_backward(
    do: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, bias_gradient: bool, *call
) -> tuple[Tensor, Tensor]:
    """Return dqkv (B, N, 3, H, D) and the bias's gradient."""
    B, N, _, H, D = qkv.shape
    layout = _layout(qkv, call)
    do, out, lse = aligned(do), aligned(out), aligned(lse)
    launches = _backward_launches.get(layout)
    if launches is not None:
        dqkv = qkv.new_empty(qkv.shape)
        _relaunch_backward(launches, do, out, lse, qkv, dqkv)
        return dqkv, qkv.new_empty(0)
    inputs = _inputs(*_views(interpretable(qkv)), call)
    out_BHND, do_BHND = (interpretable(x).view(B, N, H, D).transpose(1, 2) for x in (out, do))
    dqkv = inputs.q.new_empty(qkv.shape)
    bias_shape = tuple(call[0].shape) if bias_gradient else None
    dbias, launches = backward(inputs, out_BHND, lse, do_BHND, _views(dqkv), _tiles(call), bias_shape)
    _remember(_backward_launches, layout, inputs, qkv, launches)
    return dqkv.to(qkv.dtype), _bias_gradient(call, dbias, qkv)


def _relaunch_backward(launches: list, do: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, dqkv: Tensor) -> None:
    q, k, v = _addresses(qkv)
    dq, dk, dv = _addresses(dqkv)
    do_address = do.data_ptr()
    if len(launches) == 1:  # all tokens in one tile
        launches[0](q, k, v, do_address, dq, dk, dv, lse.data_ptr(), None, *_NO_EXTRAS)
        return
    delta_BHN = torch.empty_like(lse)
    statistics = lse.data_ptr(), delta_BHN.data_ptr()
    launch_dq, launch_dkdv = launches
    launch_dq(q, k, v, out.data_ptr(), do_address, dq, *statistics, None, *_NO_EXTRAS)
    launch_dkdv(q, k, v, do_address, dk, dv, *statistics, *_NO_EXTRAS)


@attend_packed_backward.register_fake
def _(do, out, lse, qkv, bias_gradient, *call):
    return qkv.new_empty(qkv.shape), _fake_bias_gradient(call, bias_gradient, qkv)


def _save_packed(ctx, inputs, output):
    qkv, *call = inputs
    _save_call(ctx, call, *output, qkv)


@differentiable_once("triton_flash")
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


@operator(f"triton_flash_rotary(Tensor qkv, Tensor rope, bool rope_half, {_CALL}) -> (Tensor, Tensor, Tensor)")
def attend_rotary(qkv: Tensor, rope: Tensor, rope_half: bool, *call) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `attend_packed` for rotated q and k, and the packed tensor with these (B, N, 3, H, D).

    rope, rope_half: see AttentionBackend.
    """
    rotated = qkv.new_empty(qkv.shape)
    fill_rotated(qkv, rotated, rope, rope_half)
    return *attend_packed.function(rotated, *call), rotated


@attend_rotary.register_fake
def _(qkv, rope, rope_half, *call):
    B, N, _, H, D = qkv.shape
    lse = qkv.new_empty(statistics_shape(_views(qkv)[0], call[0]), dtype=torch.float32)
    return qkv.new_empty(B, N, H * D), lse, qkv.new_empty(qkv.shape)


@operator(
    "triton_flash_rotary_backward(Tensor do, Tensor out, Tensor lse, Tensor rotated, Tensor rope, bool rope_half, "
    f"bool bias_gradient, {_CALL}) -> (Tensor, Tensor)"
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


@differentiable_once("triton_flash")
def _differentiate_rotary(ctx, do, _dlse, _drotated):
    if do is None:
        return (None,) * (3 + _ARGUMENTS)
    saved, call = _saved(ctx)
    dqkv, dbias = attend_rotary_backward(do, *saved, ctx.rope_half, _needs_bias_gradient(ctx), *call)
    return _gradients(dqkv, None, None, bias=dbias, ctx=ctx)


attend_rotary.register_autograd(_differentiate_rotary, setup_context=_save_rotary)
