"""The compiled Hopper kernels of `pallas_flash` for one attention call, and the choice among them."""

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper import bias_groups
from vitkernels.attention.pallas_flash.hopper.backward import Backward
from vitkernels.attention.pallas_flash.hopper.bias_gradient import BiasGradient
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
from vitkernels.attention.pallas_flash.hopper.fused_order import Starts
from vitkernels.attention.pallas_flash.hopper.overlapped_forward import OverlappedForward
from vitkernels.attention.pallas_flash.hopper.schedule import (
    MOST_DS,
    MULTIPROCESSORS,
    ROWS,
    Schedule,
    bias_gradient_parts,
    bias_gradient_schedule,
    dkdv_schedule,
    dq_schedule,
    for_packed_segments,
    forward_of_packed_segments,
    forward_schedule,
    fused_backward_schedule,
    is_short,
    overlapped_forward_schedule,
    overlaps_forward,
    takes_quads,
    with_bias,
)
from vitkernels.attention.pallas_flash.hopper.short_backward import ShortBackward
from vitkernels.attention.pallas_flash.hopper.short_forward import ShortForward
from vitkernels.attention.pallas_flash.hopper.tiles import HopperKernel, has_packed_segments, padded
from vitkernels.attention.pallas_flash.hopper.token_ids import given
from vitkernels.bridge.mosaic_gpu import Kernel


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
    chunks: tuple[int, int] | None = None  # of queries and keys in a call with ids, which follow each kernel's inputs
    bias_shape: tuple[int, int] | None = None  # images and heads of a bias, which precedes the ids
    bias_dtype: torch.dtype = torch.float32

    @property
    def _has_packed_segments(self) -> bool:
        return has_packed_segments(self.queries, self.chunks)

    @property
    def _has_quads(self) -> bool:
        return self._has_packed_segments and takes_quads(self.head_dim)

    def _build(self, kind: type, schedule: Schedule | None, **options: int) -> Any:
        return kind(
            batch=self.batch,
            heads=self.heads,
            queries=self.queries,
            keys=self.keys,
            head_dim=self.head_dim,
            dtype=_name(self.dtype),
            scale=self.scale,
            is_causal=self.is_causal,
            all_heads=(3 if self.packed else 1) * self.heads,
            first_heads=(0, self.heads, 2 * self.heads) if self.packed else (0, 0, 0),
            schedule=schedule,
            multiprocessors=_multiprocessors(self.device),
            chunks=self.chunks,
            bias_shape=self.bias_shape,
            bias_dtype=_name(self.bias_dtype),
            **options,
        )

    def _with_bias(self, schedule: Schedule, kept: int) -> Schedule:
        """Return the schedule for the call's bias, if it has one; see with_bias."""
        if self.bias_shape is None:
            return schedule
        return with_bias(schedule, self.head_dim, kept, self.bias_dtype.itemsize, self.chunks is not None)

    @cached_property
    def forward(self) -> Kernel:
        """Return the forward kernel for any length, called as (q, k, v, *bias, *ids, out, lse).

        Beside quads, it processes only the longer segments.
        """
        kernel = self._build(OverlappedForward if self._overlaps_forward else Forward, self._forward_schedule)
        return Kernel(kernel, (*_inputs(kernel), *_extras(kernel, kernel.queries)))

    @cached_property
    def short_forward(self) -> Kernel:
        """Return the forward kernel for short sequences, or quads, called as `forward`."""
        kernel = self._build(ShortForward, None)
        return Kernel(kernel, (*_inputs(kernel), *_extras(kernel, kernel.queries)))

    @property
    def _overlaps_forward(self) -> bool:
        return overlaps_forward(self.keys, self.head_dim, self.is_causal, self.bias_shape is not None)

    @property
    def _forward_schedule(self) -> Schedule:
        if self._has_packed_segments:
            return forward_of_packed_segments(self.head_dim)
        if self._overlaps_forward and self.chunks is None:
            return overlapped_forward_schedule(self.queries, self.keys, self.head_dim)
        return self._with_bias(forward_schedule(self.queries, self.keys, self.head_dim), kept=1)

    def _build_pair(self, schedule: Schedule) -> Backward:
        if not self._has_packed_segments:
            return self._build(Backward, schedule)
        schedule = for_packed_segments(schedule, self.head_dim)
        return self._build(Backward, schedule, yields=self._fused is not None)

    @cached_property
    def short_backward(self) -> Kernel:
        """Return the backward kernel for short sequences, or quads.

        It is called as (q, k, v, out, do, lse, *transposed bias, *ids, dq, dk, dv).
        """
        return self._compiled(self._build(ShortBackward, None))

    @cached_property
    def _short_backward_with_ds(self) -> ShortBackward:
        return replace(self._build(ShortBackward, None), stores_ds=True)

    @cached_property
    def short_backward_with_ds(self) -> Kernel:
        """Return the short backward kernel that also stores dS, which is its last argument."""
        return self._compiled(self._short_backward_with_ds)

    def _compiled(self, kernel: ShortBackward) -> Kernel:
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel, (*_inputs(kernel), do, do, kernel.vector(), *_extras(kernel, kernel.keys)))

    @cached_property
    def _fused(self) -> FusedBackward | None:
        """Return the description of the kernel that computes dq, dk and dv of long sequences; None if the pair does.

        Only the device knows the lengths of packed segments, so this kernel and the pair are both launched for them,
        and one of the two finds no work.
        """
        compares_ids = self.chunks is not None and not self._has_packed_segments
        is_masked = self.is_causal or self.bias_shape is not None or compares_ids
        call = self.batch * self.heads, self.queries, self.keys, self.head_dim, is_masked
        schedule = fused_backward_schedule(*call, self._has_packed_segments)
        if schedule is None:
            return None
        kernel = self._build(FusedBackward, schedule)
        return kernel if kernel.can_start_from_lse else None

    @cached_property
    def starts(self) -> Kernel:
        """Return the kernel that prepares the fused one: (out, do, lse, *ids, of_scores, of_dp, counters)."""
        kernel = self._build(Starts, None)
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel, (do, do, kernel.vector(), *kernel.id_arrays()))

    @cached_property
    def fused_backward(self) -> Kernel:
        """Return the fused kernel: (q, k, v, do, of_scores, of_dp, counters, *ids, dq, dk, dv, sums)."""
        kernel = self._fused
        assert kernel is not None
        do, vector = kernel.rows(self.queries, self.heads), kernel.vector()
        return Kernel(kernel, (*_inputs(kernel), do, vector, vector, kernel.counters, *kernel.id_arrays()))

    @property
    def _backward_size(self) -> tuple[int, int, int, bool, bool]:
        return self.queries, self.keys, self.head_dim, self.is_causal, self.bias_shape is not None

    @cached_property
    def dq(self) -> Kernel:
        """Return the dq kernel, called as (q, k, v, out, do, lse, *bias, *ids, dq, delta)."""
        kernel = self._build_pair(self._with_bias(dq_schedule(*self._backward_size), kept=3))
        do = kernel.rows(self.queries, self.heads)
        return Kernel(kernel.dq, (*_inputs(kernel), do, do, kernel.vector(), *_extras(kernel, kernel.queries)))

    @cached_property
    def dkdv(self) -> Kernel:
        """Return the dkdv kernel, called as (q, k, v, do, lse, delta, *transposed bias, *ids, dk, dv)."""
        kernel = self._build_pair(self._with_bias(dkdv_schedule(*self._backward_size), kept=2))
        do = kernel.rows(self.queries, self.heads)
        vector = kernel.vector()
        return Kernel(kernel.dkdv, (*_inputs(kernel), do, vector, vector, *_extras(kernel, kernel.keys)))

    @cached_property
    def _bias_gradient(self) -> BiasGradient:
        assert self.bias_shape is not None
        schedule = bias_gradient_schedule(self.queries, self.head_dim)
        kernel: BiasGradient = self._build(BiasGradient, schedule)
        images, heads = kernel.sharing
        elements = self.bias_shape[0] * self.bias_shape[1] * padded(self.queries) * padded(self.keys)
        parts = bias_gradient_parts(kernel.work_items(self.queries), images * heads, elements)
        return replace(kernel, parts=parts)

    @cached_property
    def bias_gradient(self) -> Kernel:
        """Return the kernel of the bias's gradient, called as (q, k, v, do, lse, delta, bias, *ids, sums)."""
        kernel = self._bias_gradient
        do, vector = kernel.rows(self.queries, self.heads), kernel.vector()
        return Kernel(kernel, (*_inputs(kernel), do, vector, vector, *_extras(kernel, kernel.queries)))

    @property
    def _is_short(self) -> bool:
        return is_short(self.queries, self.keys, self.head_dim, self.is_causal)

    def _runs_short_backward(self, bias_gradient: bool) -> bool:
        """Return whether one kernel computes the gradients; with that of a bias, it stores dS (see MOST_DS)."""
        if not self._is_short:
            return False
        return not bias_gradient or math.prod(self._short_backward_with_ds.ds.shape) <= MOST_DS

    @property
    def _forward(self) -> tuple[Kernel, ...]:
        """Return the kernels of the forward pass."""
        if self._is_short:
            return (self.short_forward,)
        return (self.short_forward, self.forward) if self._has_quads else (self.forward,)

    def _backward(self, bias_gradient: bool) -> tuple[Kernel, ...]:
        """Return the kernels of the backward pass. bias_gradient: whether the bias needs one."""
        if self._runs_short_backward(bias_gradient):
            return (self.short_backward_with_ds if bias_gradient else self.short_backward,)
        fused = () if self._fused is None else (self.starts, self.fused_backward)
        if fused and not self._has_packed_segments:
            return fused
        of_quads = (self.short_backward,) if self._has_quads else ()
        return *fused, *of_quads, self.dq, self.dkdv, *((self.bias_gradient,) if bias_gradient else ())

    def launched(self, gradient: bool, bias_gradient: bool) -> tuple[Kernel, ...]:
        """Return the kernels that the call launches, in this order; those of the backward pass with `gradient`.

        bias_gradient: whether the bias needs one.
        """
        return *self._forward, *(self._backward(bias_gradient) if gradient else ())

    def start(self, gradient: bool, bias_gradient: bool) -> None:
        """Start to compile the kernels that `launched` returns, in the background."""
        # In the order of their use: lowering a kernel takes tenths of a second.
        for kernel in self.launched(gradient, bias_gradient):
            kernel.start(self.device)

    def vector(self) -> Tensor:
        """Return an uninitialized (B, H, padded N) for log-sum-exp or delta; with ids (B, H, 64 Q), see token_ids."""
        length = padded(self.queries) if self.chunks is None else ROWS * self.chunks[0]
        return torch.empty(self.batch, self.heads, length, device=self.device)

    def run_forward(self, q, k, v, bias, ids, out, lse) -> None:
        """Fill out and log-sum-exp. bias, ids: what `padded_bias` and `token_ids` returned."""
        extras = *(() if bias is None else (bias,)), *given(ids)
        for kernel in self._forward:
            kernel(q, k, v, *extras, out, lse)

    def run_backward(self, q, k, v, out, lse, do, bias, ids, dq, dk, dv, needs_dbias: bool) -> Tensor | None:
        """Fill dq, dk and dv, and return the gradient of the bias if it is needed.

        For up to 256 tokens, that gradient takes 2 bytes per score of memory for a moment, at most 1 GB (see MOST_DS).
        Where the fused kernel may run, float32 sums of dq take as much as q and k, or with segments as q, k and v.

        bias, ids: what `padded_bias` and `token_ids` returned.
        """
        of_keys = () if bias is None else (bias_groups.transposed(bias),)
        if self._runs_short_backward(needs_dbias):
            if not needs_dbias:
                self.short_backward(q, k, v, out, do, lse, *of_keys, *given(ids), dq, dk, dv)
                return None
            ds = q.new_empty(self._short_backward_with_ds.ds.shape)
            self.short_backward_with_ds(q, k, v, out, do, lse, *of_keys, *given(ids), dq, dk, dv, ds)
            assert self.bias_shape is not None
            return bias_groups.summed(ds, self.bias_shape, self.queries, self.scale, bias.dtype)
        delta = self.vector()
        if self._fused is not None:
            of_scores, of_dp, counters = self.vector(), delta, torch.empty_like(delta, dtype=torch.int32)
            sums = torch.empty(self._fused.sums.shape, device=self.device)
            self.starts(out, do, lse, *given(ids), of_scores, of_dp, counters)
            self.fused_backward(q, k, v, do, of_scores, of_dp, counters, *given(ids), dq, dk, dv, sums)
            if not self._has_packed_segments:
                return None
        if self._has_quads:
            self.short_backward(q, k, v, out, do, lse, *given(ids), dq, dk, dv)
        biases = () if bias is None else (bias,)
        self.dq(q, k, v, out, do, lse, *biases, *given(ids), dq, delta)
        self.dkdv(q, k, v, do, lse, delta, *of_keys, *given(ids), dk, dv)
        return self._run_bias_gradient(q, k, v, do, lse, delta, bias, ids) if needs_dbias else None

    def _run_bias_gradient(self, q, k, v, do, lse, delta, bias, ids) -> Tensor:
        # Sums in float32, whatever the dtype of the bias. Zeros, because no work item writes all of the padding.
        parts = bias.new_zeros(self._bias_gradient.parts, *bias.shape, dtype=torch.float32)
        self.bias_gradient(q, k, v, do, lse, delta, bias, *given(ids), parts)
        return (parts[0] if len(parts) == 1 else parts.sum(0)).to(bias.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _multiprocessors(device: torch.device) -> int:
    """Return the GPU's multiprocessor count; 132 for another device or without a GPU.

    There, kernels are only lowered or interpreted.
    """
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return torch.cuda.get_device_properties(device).multi_processor_count if has_gpu else MULTIPROCESSORS


kernels_for = cache(AttentionKernels)  # compiled kernels are cached with it


def _inputs(kernel: HopperKernel) -> tuple:
    return tuple(kernel.rows(n, kernel.all_heads) for n in (kernel.queries, kernel.keys, kernel.keys))


def _extras(kernel: HopperKernel, own: int) -> tuple:
    """Return the shapes of the bias and ids that the call has; the bias is transposed if the `own` rows are keys."""
    other = kernel.queries + kernel.keys - own
    bias = () if kernel.bias_shape is None else (kernel.bias_array(own, other),)
    return *bias, *kernel.id_arrays()
