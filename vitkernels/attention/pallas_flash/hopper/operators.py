"""PyTorch operators around the Mosaic-GPU kernels of `pallas_flash` on Hopper, with gradients and fake outputs.

Imported only if the kernels can run, because older JAX lacks the features they need.

Shape suffixes: B batch, H heads, N query tokens, M key tokens, D head dim, 3 = q, k, v.
"""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from vitkernels.attention.pallas_flash.hopper.backward import Backward
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
from vitkernels.attention.pallas_flash.hopper.fused_kernel import Delta
from vitkernels.attention.pallas_flash.hopper.schedule import (
    MULTIPROCESSORS,
    ROWS,
    Schedule,
    dkdv_schedule,
    dq_schedule,
    fits_short_backward,
    fits_short_forward,
    forward_schedule,
    fused_backward_schedule,
)
from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
from vitkernels.attention.pallas_flash.hopper.tiles import HopperKernel, padded
from vitkernels.bridge.mosaic_gpu import Kernel
from vitkernels.bridge.operator import aligned, differentiable_once, operator


@dataclass(frozen=True)
class AttentionKernels:
    """The compiled kernels of a call; the fields are all they depend on. Arrays are stored as (B, N, heads, D)."""

    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    dtype: torch.dtype
    is_causal: bool
    scale: float
    packed: bool  # q, k and v, and their gradients, share one array of 3 H heads
    device: torch.device
    has_ids: bool = False  # ids of queries and keys follow each kernel's inputs

    def _build(self, kind: type, schedule: Schedule | None) -> Any:
        return kind(
            batch=self.batch,
            heads=self.heads,
            queries=self.queries,
            keys=self.keys,
            head_dim=self.head_dim,
            dtype=str(self.dtype).removeprefix("torch."),
            scale=self.scale,
            is_causal=self.is_causal,
            all_heads=(3 if self.packed else 1) * self.heads,
            first_heads=(0, self.heads, 2 * self.heads) if self.packed else (0, 0, 0),
            schedule=schedule,
            multiprocessors=_multiprocessors(self.device),
            has_ids=self.has_ids,
        )

    @property
    def _is_masked(self) -> bool:
        """Return whether the kernels mask individual weights, which costs registers."""
        return self.is_causal or self.has_ids

    @cached_property
    def forward(self) -> Kernel:
        """Return the forward kernel, called as (q, k, v, *ids, out, lse)."""
        if fits_short_forward(self.queries, self.keys, self.head_dim, self._is_masked):
            kernel = self._build(ShortForward, None)
        else:
            kernel = self._build(Forward, forward_schedule(self.queries, self.keys, self.head_dim))
        return Kernel(kernel, (*_inputs(kernel), *_ids(kernel, kernel.queries)))

    @cached_property
    def short_backward(self) -> Kernel:
        """Return the short backward kernel, called as (q, k, v, out, do, lse, dq, dk, dv)."""
        kernel = self._build(ShortBackward, None)
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel, (*_inputs(kernel), do, do, kernel.vector()))

    @cached_property
    def _fused(self) -> FusedBackward | None:
        """Return the description of the kernel that computes dq, dk and dv of long sequences; None if the pair does."""
        heads = self.batch * self.heads
        schedule = fused_backward_schedule(heads, self.queries, self.keys, self.head_dim, self._is_masked)
        return None if schedule is None else self._build(FusedBackward, schedule)

    @cached_property
    def delta(self) -> Kernel:
        """Return the kernel that prepares the fused one, called as (out, do, delta, counters)."""
        kernel = self._build(Delta, None)
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel, (do, do))

    @cached_property
    def fused_backward(self) -> Kernel:
        """Return the fused backward kernel, called as (q, k, v, do, lse, delta, counters, dq, dk, dv, sums)."""
        kernel = self._fused
        assert kernel is not None
        do, vector = kernel.rows(self.queries, self.heads), kernel.vector()
        return Kernel(kernel, (*_inputs(kernel), do, vector, vector, kernel.counters()))

    @cached_property
    def dq(self) -> Kernel:
        """Return the dq kernel, called as (q, k, v, out, do, lse, *ids, dq, delta)."""
        kernel = self._build(Backward, dq_schedule(self.queries, self.keys, self.head_dim, self._is_masked))
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel.dq, (*_inputs(kernel), do, do, kernel.vector(), *_ids(kernel, kernel.queries)))

    @cached_property
    def dkdv(self) -> Kernel:
        """Return the dkdv kernel, called as (q, k, v, do, lse, delta, *ids, dk, dv)."""
        kernel = self._build(Backward, dkdv_schedule(self.queries, self.keys, self.head_dim, self._is_masked))
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel.dkdv, (*_inputs(kernel), do, kernel.vector(), kernel.vector(), *_ids(kernel, kernel.keys)))

    def vector(self) -> Tensor:
        """Return an uninitialized (B, H, padded N), for log-sum-exp or delta."""
        return torch.empty(self.batch, self.heads, padded(self.queries), device=self.device)

    def run_backward(self, q, k, v, out, lse, do, ids, dq, dk, dv) -> None:
        """Fill dq, dk and dv. ids: what `token_ids` returned."""
        if fits_short_backward(self.queries, self.keys, self.head_dim, self._is_masked):
            self.short_backward(q, k, v, out, do, lse, dq, dk, dv)
            return
        delta = self.vector()
        if self._fused is not None:
            counters = torch.empty_like(delta, dtype=torch.int32)
            sums = torch.empty(self._fused.sums.shape, device=self.device)
            self.delta(out, do, delta, counters)
            self.fused_backward(q, k, v, do, lse, delta, counters, dq, dk, dv, sums)
            return
        self.dq(q, k, v, out, do, lse, *by_queries(ids), dq, delta)
        self.dkdv(q, k, v, do, lse, delta, *by_keys(ids), dk, dv)


def _multiprocessors(device: torch.device) -> int:
    """Return the GPU's multiprocessor count; 132 without a GPU, where kernels are only lowered."""
    has_gpu = torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if has_gpu else MULTIPROCESSORS


kernels_for = cache(AttentionKernels)  # compiled kernels are cached with it


def _inputs(kernel: HopperKernel) -> tuple:
    return tuple(kernel.rows(n, kernel.all_heads) for n in (kernel.queries, kernel.keys, kernel.keys))


def _ids(kernel: HopperKernel, own: int) -> tuple:
    ids = kernel.id_vector(kernel.queries), kernel.id_vector(kernel.keys), kernel.span_vector(own)
    return ids if kernel.has_ids else ()


# --- masks and segments as ids ----------------------------------------------------------------------------------------

_LEAST = torch.iinfo(torch.int32).min
MASKED, PADDING = _LEAST, _LEAST + 1  # ids of masked keys, and of padded queries


Ids = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def token_ids(shape: tuple[int, ...], keys: int, mask: Tensor | None, segment_ids: Tensor | None) -> Ids:
    """Encode mask and segments as ids: a query attends to the keys with its id. All ids are None if there are neither.

    This runs outside the operators, so a compiled model computes the ids once for all layers.

    Args:
        shape: of q, (B, H, N, D).
        keys: the number of keys, M.
        mask: boolean, (B or 1, 1, 1, M or 1) or with leading ones left out; True keeps.
        segment_ids: (B, N), for as many keys as queries.

    Returns the ids of queries (B, padded N) and of keys (B, padded M), int32; for each block of 64 queries the span of
    keys it needs (B, 2, padded N / 64), and for each block of 64 keys the span of queries: see RingKernel.span_of.
    """
    if mask is None and segment_ids is None:
        return None, None, None, None
    B, _, N, _ = shape
    device = mask.device if mask is not None else segment_ids.device  # type: ignore[union-attr]  # one is given
    if segment_ids is None:
        of_queries, of_keys = torch.zeros(2, B, max(N, keys), dtype=torch.int32, device=device).unbind(0)
    else:
        of_queries = of_keys = segment_ids.to(torch.int32)
    of_queries, of_keys = of_queries[:, :N], of_keys[:, :keys]
    if mask is not None:
        keep = mask[(None,) * (4 - mask.ndim)][:, 0, 0]
        of_keys = torch.where(keep, of_keys, MASKED)
    of_queries, of_keys = (
        F.pad(x, (0, padded(x.shape[1]) - x.shape[1]), value=value).contiguous()
        for x, value in ((of_queries, PADDING), (of_keys, MASKED))
    )
    return of_queries, of_keys, _spans(of_queries, of_keys), _spans(of_keys, of_queries)


def by_queries(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids in the order of the forward and dq kernels' arguments; an empty tuple if there are no ids."""
    return tuple(x for x in ids[:3] if x is not None)


def by_keys(ids: Ids) -> tuple[Tensor, ...]:
    """Return the ids in the order of the dkdv kernel's arguments; an empty tuple if there are no ids."""
    return tuple(x for x in (ids[0], ids[1], ids[3]) if x is not None)


def _spans(own_ids: Tensor, other_ids: Tensor) -> Tensor:
    """Return the range (first, end) of other rows that each block of 64 own rows needs, in blocks of 64.

    The range follows from the smallest and largest id of each block, so it is tight if segments are contiguous and
    ordered, as packing produces them.
    """
    (own_low, own_high), (low, high) = _extremes(own_ids), _extremes(other_ids)
    meets = (own_low[:, :, None] <= high[:, None]) & (low[:, None] <= own_high[:, :, None])
    at = torch.arange(low.shape[1], dtype=torch.int32, device=low.device)
    first, end = torch.where(meets, at, low.shape[1]).amin(-1), torch.where(meets, at + 1, 0).amax(-1)
    return torch.stack([first, end], 1)


def _extremes(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest id in each block of 64 rows, ignoring masked keys and padding."""
    ids = ids.unflatten(1, (-1, ROWS))
    counts = ids > PADDING
    return torch.where(counts, ids, -_LEAST - 1).amin(-1), torch.where(counts, ids, _LEAST).amax(-1)


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
