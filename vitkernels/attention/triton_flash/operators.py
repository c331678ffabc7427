"""PyTorch operators around the flash-attention kernels: opaque to torch.compile, with gradients and fake outputs.

bias and mask are those of `padded_keys`; segment_tiles is the result of `tiles_of_call`.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vitkernels.attention.rotation import fill_rotated
from vitkernels.attention.triton_flash.inputs import FlashInputs, statistics_shape
from vitkernels.attention.triton_flash.launch import backward, forward
from vitkernels.bridge.operator import BoundedCache, aligned, differentiable_once, interpretable, operator


def _views(packed_BN3HD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q_BHND, k_BHND, v_BHND = packed_BN3HD.permute(2, 0, 3, 1, 4).unbind(0)
    return q_BHND, k_BHND, v_BHND


def _inputs(q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles) -> FlashInputs:
    q, k, v, bias = (interpretable(x) for x in (q, k, v, bias))
    return FlashInputs.of(q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles)


def _rows_like(x_BHND: Tensor) -> Tensor:
    """Return a new (B, H, N, D) tensor with (B, N, H, D) memory layout, which projections read and write."""
    B, H, N, D = x_BHND.shape
    return x_BHND.new_empty(B, N, H, D).transpose(1, 2)


# --- separate q, k, v -------------------------------------------------------------------------------------------------


@operator(
    "triton_flash(Tensor q, Tensor k, Tensor v, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "int[] tiles, Tensor? segment_tiles) -> (Tensor, Tensor)"
)
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return out (B, H, N, D), and the scores' log-sum-exp for the backward pass; see forward_kernel."""
    inputs = _inputs(q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles)
    out_BHND = _rows_like(inputs.q)
    lse_BHN = inputs.new_statistics()
    forward(inputs, out_BHND, lse_BHN, tiles)
    return out_BHND.to(q.dtype), lse_BHN


@attend.register_fake
def _(q, k, v, bias, mask, segment_ids, is_causal, scale, tiles, segment_tiles):
    return _rows_like(q), q.new_empty(statistics_shape(q, bias), dtype=torch.float32)


@operator(
    "triton_flash_backward(Tensor do, Tensor out, Tensor lse, Tensor q, Tensor k, Tensor v, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "bool needs_dbias, int[] tiles, Tensor? segment_tiles)"
    " -> (Tensor, Tensor, Tensor, Tensor)"
)
def attend_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    needs_dbias: bool,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dbias; dbias is empty if not needed."""
    inputs = _inputs(q, k, v, bias, mask, segment_ids, is_causal, scale, segment_tiles)
    out, do = interpretable(out), interpretable(do)
    dq, dk, dv = (_rows_like(x) for x in (inputs.q, inputs.k, inputs.v))
    dbias, _ = backward(inputs, out, lse, do, (dq, dk, dv), tiles, _dbias_shape(bias, needs_dbias))
    return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), _dbias_or_empty(bias, dbias, q)


@attend_backward.register_fake
def _(do, out, lse, q, k, v, bias, mask, segment_ids, is_causal, scale, needs_dbias, tiles,
      segment_tiles):  # fmt: skip
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_dbias else q.new_empty(0)
    return _rows_like(q), _rows_like(k), _rows_like(v), dbias


def _dbias_shape(bias: Tensor | None, needs_dbias: bool) -> tuple[int, ...] | None:
    return tuple(bias.shape) if needs_dbias and bias is not None else None


def _dbias_or_empty(bias: Tensor | None, dbias: Tensor | None, q: Tensor) -> Tensor:
    """Return dbias in the bias's shape and dtype; an empty tensor if it was not needed."""
    return q.new_empty(0) if bias is None or dbias is None else dbias.view(bias.shape).to(bias.dtype)


def _save(ctx, inputs, output):
    *tensors, is_causal, scale, tiles, segment_tiles = inputs
    ctx.save_for_backward(*output, *tensors, segment_tiles)
    ctx.is_causal, ctx.scale, ctx.tiles = is_causal, scale, tiles
    ctx.set_materialize_grads(False)


@differentiable_once("triton_flash")
def _differentiate(ctx, do, _dlse):
    if do is None:
        return (None,) * 10
    out, lse, q, k, v, *extras, segment_tiles = ctx.saved_tensors
    needs_dbias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = attend_backward(
        do, out, lse, q, k, v, *extras, ctx.is_causal, ctx.scale, needs_dbias, ctx.tiles, segment_tiles
    )
    return dq, dk, dv, dbias if needs_dbias else None, *(None,) * 6


attend.register_autograd(_differentiate, setup_context=_save)


# --- packed qkv -------------------------------------------------------------------------------------------------------
# Creating and inspecting views of q, k and v takes longer than a launch, so a plain call with a known layout launches
# directly with addresses.

_NO_EXTRAS = (None,) * 4
_forward_launches, _backward_launches = BoundedCache(), BoundedCache()  # layout of a plain call -> its launches


def _layout(qkv: Tensor, bias, mask, segment_ids, is_causal: bool, scale: float, tiles: Sequence[int]) -> tuple | None:
    """Return everything the launches of a plain call on the current GPU depend on; None for any other call."""
    if any(x is not None for x in (bias, mask, segment_ids)) or not qkv.is_cuda or not qkv.numel():
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


@operator(
    "triton_flash_packed(Tensor qkv, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "int[] tiles, Tensor? segment_tiles) -> (Tensor, Tensor)"
)
def attend_packed(
    qkv: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Map qkv (B, N, 3, H, D) to out (B, N, H * D) and log-sum-exp; see forward_kernel."""
    B, N, _, H, D = qkv.shape
    layout = _layout(qkv, bias, mask, segment_ids, is_causal, scale, tiles)
    given = interpretable(qkv)
    out_BNE = given.new_empty(B, N, H * D)
    launches = _forward_launches.get(layout)
    if launches is not None:
        lse_BHN = given.new_empty(B, H, N, dtype=torch.float32)
        launches[0](*_addresses(qkv), out_BNE.data_ptr(), lse_BHN.data_ptr(), *_NO_EXTRAS)
        return out_BNE, lse_BHN
    inputs = _inputs(*_views(given), bias, mask, segment_ids, is_causal, scale, segment_tiles)
    lse_BHN = inputs.new_statistics()
    launch = forward(inputs, out_BNE.view(B, N, H, D).transpose(1, 2), lse_BHN, tiles)
    _remember(_forward_launches, layout, inputs, qkv, [launch])
    return out_BNE.to(qkv.dtype), lse_BHN


@attend_packed.register_fake
def _(qkv, bias, mask, segment_ids, is_causal, scale, tiles, segment_tiles):
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H * D), qkv.new_empty(statistics_shape(_views(qkv)[0], bias), dtype=torch.float32)


@operator(
    "triton_flash_packed_backward(Tensor do, Tensor out, Tensor lse, Tensor qkv, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "bool needs_dbias, int[] tiles, Tensor? segment_tiles)"
    " -> (Tensor, Tensor)"
)
def attend_packed_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    needs_dbias: bool,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dqkv (B, N, 3, H, D) and dbias; dbias is empty if not needed."""
    B, N, _, H, D = qkv.shape
    layout = _layout(qkv, bias, mask, segment_ids, is_causal, scale, tiles)
    do, out, lse = aligned(do), aligned(out), aligned(lse)
    launches = _backward_launches.get(layout)
    if launches is not None:
        dqkv = qkv.new_empty(qkv.shape)
        _relaunch_backward(launches, do, out, lse, qkv, dqkv)
        return dqkv, qkv.new_empty(0)
    views = _views(interpretable(qkv))
    inputs = _inputs(*views, bias, mask, segment_ids, is_causal, scale, segment_tiles)
    out_BHND, do_BHND = (interpretable(x).view(B, N, H, D).transpose(1, 2) for x in (out, do))
    dqkv = inputs.q.new_empty(qkv.shape)
    dbias, launches = backward(inputs, out_BHND, lse, do_BHND, _views(dqkv), tiles, _dbias_shape(bias, needs_dbias))
    _remember(_backward_launches, layout, inputs, qkv, launches)
    return dqkv.to(qkv.dtype), _dbias_or_empty(bias, dbias, qkv)


def _relaunch_backward(launches: list, do: Tensor, out: Tensor, lse: Tensor, qkv: Tensor, dqkv: Tensor) -> None:
    q, k, v = _addresses(qkv)
    dq, dk, dv = _addresses(dqkv)
    do_address = do.data_ptr()
    if len(launches) == 1:  # all tokens in one tile
        launches[0](q, k, v, do_address, dq, dk, dv, lse.data_ptr(), None, *_NO_EXTRAS)
        return
    delta_BHN = torch.empty_like(lse)
    statistics = lse.data_ptr(), delta_BHN.data_ptr(), *_NO_EXTRAS
    launch_dq, launch_dkdv = launches
    launch_dq(q, k, v, out.data_ptr(), do_address, dq, *statistics)
    launch_dkdv(q, k, v, do_address, dk, dv, *statistics)


@attend_packed_backward.register_fake
def _(do, out, lse, qkv, bias, mask, segment_ids, is_causal, scale, needs_dbias, tiles,
      segment_tiles):  # fmt: skip
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_dbias else qkv.new_empty(0)
    return qkv.new_empty(qkv.shape), dbias


@differentiable_once("triton_flash")
def _differentiate_packed(ctx, do, _dlse):
    if do is None:
        return (None,) * 8
    out, lse, qkv, *extras, segment_tiles = ctx.saved_tensors
    needs_dbias = ctx.needs_input_grad[1]
    dqkv, dbias = attend_packed_backward(
        do, out, lse, qkv, *extras, ctx.is_causal, ctx.scale, needs_dbias, ctx.tiles, segment_tiles
    )
    return dqkv, dbias if needs_dbias else None, *(None,) * 6


attend_packed.register_autograd(_differentiate_packed, setup_context=_save)


# --- packed qkv with rotary embeddings --------------------------------------------------------------------------------
# One operator rotates and attends, so that it owns the packed tensors that the rotation fills: the rotated copy, which
# is saved instead of qkv, and the gradient, which is rotated back in place.


@operator(
    "triton_flash_rotary(Tensor qkv, Tensor rope, bool rope_half, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "int[] tiles, Tensor? segment_tiles) -> (Tensor, Tensor, Tensor)"
)
def attend_rotary(
    qkv: Tensor,
    rope: Tensor,
    rope_half: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of `attend_packed` for rotated q and k, and the packed tensor with these (B, N, 3, H, D).

    rope, rope_half: see AttentionBackend.
    """
    rotated = qkv.new_empty(qkv.shape)
    fill_rotated(qkv, rotated, rope, rope_half)
    call = bias, mask, segment_ids, is_causal, scale, tiles, segment_tiles
    return *attend_packed.function(rotated, *call), rotated


@attend_rotary.register_fake
def _(qkv, rope, rope_half, bias, mask, segment_ids, is_causal, scale, tiles, segment_tiles):
    B, N, _, H, D = qkv.shape
    lse = qkv.new_empty(statistics_shape(_views(qkv)[0], bias), dtype=torch.float32)
    return qkv.new_empty(B, N, H * D), lse, qkv.new_empty(qkv.shape)


@operator(
    "triton_flash_rotary_backward(Tensor do, Tensor out, Tensor lse, Tensor rotated, Tensor rope, bool rope_half, "
    "Tensor? bias, Tensor? mask, Tensor? segment_ids, bool is_causal, float scale, "
    "bool needs_dbias, int[] tiles, Tensor? segment_tiles)"
    " -> (Tensor, Tensor)"
)
def attend_rotary_backward(
    do: Tensor,
    out: Tensor,
    lse: Tensor,
    rotated: Tensor,
    rope: Tensor,
    rope_half: bool,
    bias: Tensor | None,
    mask: Tensor | None,
    segment_ids: Tensor | None,
    is_causal: bool,
    scale: float,
    needs_dbias: bool,
    tiles: Sequence[int],
    segment_tiles: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return dqkv (B, N, 3, H, D) and dbias; dbias is empty if not needed."""
    call = bias, mask, segment_ids, is_causal, scale, needs_dbias, tiles, segment_tiles
    dqkv, dbias = attend_packed_backward.function(do, out, lse, rotated, *call)
    dq_and_dk = dqkv[:, :, :2]
    fill_rotated(dq_and_dk, dq_and_dk, rope, rope_half, inverse=True)
    return dqkv, dbias


@attend_rotary_backward.register_fake
def _(do, out, lse, rotated, rope, rope_half, bias, mask, segment_ids, is_causal, scale, needs_dbias, tiles,
      segment_tiles):  # fmt: skip
    dbias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_dbias else rotated.new_empty(0)
    return rotated.new_empty(rotated.shape), dbias


def _save_rotary(ctx, inputs, output):
    _, rope, ctx.rope_half, *extras, is_causal, scale, tiles, segment_tiles = inputs
    ctx.save_for_backward(*output, rope, *extras, segment_tiles)
    ctx.is_causal, ctx.scale, ctx.tiles = is_causal, scale, tiles
    ctx.set_materialize_grads(False)


@differentiable_once("triton_flash")
def _differentiate_rotary(ctx, do, _dlse, _drotated):
    if do is None:
        return (None,) * 10
    out, lse, rotated, rope, *extras, segment_tiles = ctx.saved_tensors
    needs_dbias = ctx.needs_input_grad[3]
    call = *extras, ctx.is_causal, ctx.scale, needs_dbias, ctx.tiles, segment_tiles
    dqkv, dbias = attend_rotary_backward(do, out, lse, rotated, rope, ctx.rope_half, *call)
    return dqkv, None, None, dbias if needs_dbias else None, *(None,) * 6


attend_rotary.register_autograd(_differentiate_rotary, setup_context=_save_rotary)
