"""Base of DDP and FSDP: processes with one device each, started by torchrun."""

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vitkernels import torchrun_environment
from vitkernels.errors import UsageError
from vitkernels.parallel.heartbeat import Heartbeat
from vitkernels.parallel.process_group import ProcessGroup
from vitkernels.runtime import Runtime
from vitkernels.runtime.base import PRECISIONS


class TorchrunProcesses(ProcessGroup):
    """The process group that torchrun describes in the environment.

    overlap: communicate during backward, block by block, with each block compiled on its own (True), or all at once
        before and after it, with the model compiled as one graph (False). None: True on several hosts. Observed on 4
        H200s with a ViT-B under FSDP and gather="bf16": of a 50 ms step NCCL ran for 1.7 ms, and matrix products that
        share the GPU with it take up to 1.9 times as long.
    reduce: the precision in which gradients are averaged.
    """

    def __init__(self, runtime: Runtime, lost_after: float, overlap: bool | None = None, reduce: str = "fp32"):
        super().__init__(runtime)
        self.device = runtime.device
        self.rank, self.world = torchrun_rank_and_world()
        one_host = torchrun_environment.local_world_size(self.world) == self.world
        self.overlap = not one_host if overlap is None else overlap
        self.reduce_dtype = PRECISIONS[reduce]
        on_gpu = self.device.type == "cuda"
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._join(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            Heartbeat(self.rank, self.world, lost_after, address),
            store=_store_of_this_attempt(),
            device_id=self.device if on_gpu else None,
        )

    def describe(self) -> str:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        when = "during" if self.overlap else "after"
        return f"{self.name}, {self.world} processes, {backend}, gradients averaged {when} backward"

    def _compile(self, model: nn.Module, mode: str | None) -> None:
        """Compile in place, inside the communication hooks, which stay outside the compiled graph."""
        torch._dynamo.config.optimize_ddp = False  # it would split the graph at DDP's buckets
        blocks: Any = model.blocks
        limit = torch._dynamo.config.recompile_limit  # per code object; blocks share one, apart from their drop path
        torch._dynamo.config.recompile_limit = max(limit, 4 * len(blocks))
        for module in blocks if self.overlap else [model]:
            module.forward = torch.compile(module.forward, mode=mode)


def torchrun_rank_and_world() -> tuple[int, int]:
    """Return (rank, world) as torchrun sets them. UsageError if torchrun did not start this process."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as error:
        raise UsageError(
            "ddp and fsdp train on several processes, which torchrun starts: torchrun --nproc-per-node=NUMBER ...",
            code="parallel.launch",
        ) from error


def _store_of_this_attempt() -> dist.Store:
    """Return a store with keys of this attempt: torchrun's store outlives a restart and holds dead addresses."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, _, _ = next(dist.rendezvous("env://"))
    return dist.PrefixStore(f"attempt_{attempt}", store)
