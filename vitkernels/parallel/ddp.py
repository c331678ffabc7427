"""Data parallelism on torchrun's processes: DistributedDataParallel, or gradients sent by the GPUs' copy engines.

Source: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training" (arXiv:2006.15704).
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from vitkernels.errors import UsageError
from vitkernels.parallel import copy_engine, host_all_reduce, host_memory
from vitkernels.parallel.compile_options import compile_options
from vitkernels.parallel.gradient_sends import can_send_between_cuda_graphs
from vitkernels.parallel.host_memory import SharedHostRows
from vitkernels.parallel.torchrun import TorchrunProcesses, torchrun_rank_and_world
from vitkernels.runtime import Runtime
from vitkernels.runtime.base import PRECISIONS

log = logging.getLogger("vitkernels")

_LARGE_BUCKET_MB = 128  # few collectives, yet the copy into one bucket overlaps the transfer of another


class Ddp(TorchrunProcesses):
    """Each process holds a replica of the model; gradients are averaged.

    send: how gradients travel.
        "nccl": by NCCL.
        "copy": by the GPUs' copy engines through host memory, in float32 or in a narrower dtype that holds the same
            numbers. They are sent during the backward pass of a model compiled as one graph, or after it if overlap is
            False; see copy_engine.py.
        "auto": by the copy engines where they measured faster, else by NCCL (gloo on CPUs); the log gives the reason.
    accum_steps: micro-batches per optimizer step.
    """

    name = "ddp"

    def __init__(
        self,
        runtime: Runtime,
        lost_after: float,
        overlap: bool | None = None,
        reduce: str = "fp32",
        send: str = "auto",
        accum_steps: int = 1,
    ):
        device, self.send, self.accum_steps = runtime.device, send, accum_steps
        self.overlap_copies = overlap is not False
        if send == "nccl" and device.type != "cuda":
            raise UsageError(
                f"send='nccl' needs NVIDIA GPUs, and the device is {device.type}: use send='auto'",
                code="parallel.send",
                send=send,
            )
        self._may_copy = send == "copy" or (send == "auto" and device.type == "cuda")
        self._cannot_copy: str | None = None  # the reason
        self._logged: str | None = None
        if self._may_copy:
            self._cannot_copy = copy_engine.unsupported(device, torchrun_rank_and_world()[1], PRECISIONS[reduce])
            self._raise_if_required(self._cannot_copy)
        super().__init__(runtime, lost_after, False if send == "copy" else overlap, reduce)
        with self._leave_on_error():
            if self._may_copy:
                self._cannot_copy = self._first_reason(self._cannot_copy)
                if self._cannot_copy is None:
                    reason = host_memory.unavailable(self.rank, device, self.gather)
                    self._cannot_copy = self._first_reason(reason)
                self._raise_if_required(self._cannot_copy)

    def _first_reason(self, reason: str | None) -> str | None:
        """Return the first reason among all ranks, so that all ranks decide alike."""
        return next(filter(None, self.gather(reason)), None)

    def _raise_if_required(self, reason: str | None) -> None:
        if reason and self.send == "copy":
            raise UsageError(
                f"send='copy' is unavailable: {reason}; send='auto' falls back to NCCL",
                code="parallel.send",
                send=self.send,
                reason=reason,
            )

    def describe(self) -> str:
        if not self._may_copy:
            return super().describe()
        when = "during" if self.overlap_copies else "after"
        how = f", copy engines, gradients sent {when} backward" if self.send == "copy" else ""  # auto: `wrap` logs it
        return f"{self.name}, {self.world} processes{how}"

    def no_cuda_graphs(self) -> str | None:
        if self.send == "copy" and self.overlap_copies and not can_send_between_cuda_graphs():
            return "send='copy' during backward needs torch 2.11 to send between them"
        return None

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        is_trained = any(p.requires_grad for p in model.parameters())
        if self._may_copy and is_trained and self._uses_copy_engine(model, compiled, mode):
            options = compile_options(compiled, mode)
            return copy_engine.CopyEngineDataParallel(model, self._make_all_reduce, self.overlap_copies, options)
        if compiled:
            self._compile(model, mode)
        if not is_trained:  # a model that is only evaluated
            return model
        net = DistributedDataParallel(
            model,
            device_ids=[self.device] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            bucket_cap_mb=None if self.overlap else _LARGE_BUCKET_MB,
        )
        if self.reduce_dtype == torch.bfloat16:
            net.register_comm_hook(None, bf16_compress_hook)
        return net

    def _uses_copy_engine(self, model: nn.Module, compiled: bool, mode: str | None) -> bool:
        """Decide whether the copy engines send this model's gradients, and log the reason if they do not."""
        options = compile_options(compiled, mode)
        reason = self._cannot_copy or copy_engine.unsupported_model(model, options, self.overlap_copies)
        self._raise_if_required(reason)
        if self.send == "auto":
            reason = reason or copy_engine.not_measured_faster(
                model, self.world, options, self.overlap_copies, self.accum_steps, self.device
            )
            reason = self._first_reason(reason)  # GPUs can differ in memory size
            when = "during" if self.overlap else "after"
            how = f"nccl, {when} backward (copy engines: {reason})" if reason else "copy engines, during backward"
            if how != self._logged:  # the EMA of a model repeats its decision
                log.info("send='auto': gradients by %s", how)
            self._logged = how
        return reason is None

    def _make_all_reduce(
        self, shapes: list[torch.Size], dtypes: list[torch.dtype], first_small: int, order: list[int]
    ) -> host_all_reduce.HostAllReduce:
        """Build the all-reduce that CopyEngineDataParallel requests; all ranks agree on dtypes and buckets."""
        # Inductor pads a product where that is faster. Each rank times that for itself, and a padded gradient is not
        # the tensor that was cast, so ranks may differ in dtype.
        dtypes_by_rank, orders = zip(*self.gather((dtypes, order)), strict=True)
        dtypes = [max(candidates, key=lambda dtype: dtype.itemsize) for candidates in zip(*dtypes_by_rank, strict=True)]
        sizes = [shape.numel() for shape in shapes]
        buckets = host_all_reduce.assign_buckets(sizes, dtypes, first_small, orders[0])
        length = host_all_reduce.row_bytes(sizes, dtypes)
        all_reduce, failure = None, None
        try:
            host = SharedHostRows(length, host_all_reduce.flag_count(buckets), self.rank, self.device, self.gather)
            all_reduce = host_all_reduce.HostAllReduce(shapes, dtypes, buckets, host)
        except (OSError, RuntimeError) as error:
            failure = str(error).splitlines()[0]
        if failure := self._first_reason(failure):
            raise UsageError(
                f"could not allocate {self.world * length / 2**30:.1f} GiB of host memory, and as much on each GPU, "
                f"for the gradients of all ranks: {failure}; send='nccl' needs neither",
                code="parallel.host_memory",
                reason=failure,
            )
        assert all_reduce is not None  # else there is a failure
        return all_reduce

    @contextlib.contextmanager
    def accumulating(self, net: nn.Module, last: bool) -> Iterator[None]:
        if not isinstance(net, DistributedDataParallel):
            copies: Any = net  # a CopyEngineDataParallel
            copies.begin(last)
            yield
            return
        with contextlib.nullcontext() if last else net.no_sync():
            yield
