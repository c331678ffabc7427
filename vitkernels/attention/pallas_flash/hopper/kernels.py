"""The compiled Hopper kernels of `pallas_flash` for one attention call, and the choice among them."""

from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from vitkernels.attention.pallas_flash.hopper.backward import Backward
from vitkernels.attention.pallas_flash.hopper.forward import Forward
from vitkernels.attention.pallas_flash.hopper.fused_backward import FusedBackward
from vitkernels.attention.pallas_flash.hopper.fused_order import Delta
from vitkernels.attention.pallas_flash.hopper.schedule import (
    MULTIPROCESSORS,
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
from vitkernels.attention.pallas_flash.hopper.token_ids import by_keys, by_queries
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
        return Kernel(kernel, (*_inputs(kernel), do, vector, vector, kernel.counters))

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
