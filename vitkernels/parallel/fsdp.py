"""Fully sharded data parallelism on torchrun's processes, by torch.distributed.fsdp.fully_shard (FSDP2).

Source: Zhao et al., "PyTorch FSDP: Experiences on Scaling Fully Sharded Data Parallel" (arXiv:2304.11277).
"""

import contextlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from vitkernels.errors import UsageError
from vitkernels.parallel.compile_options import compile_options, uses_cuda_graphs
from vitkernels.parallel.local_shards import (
    ELEMENTWISE,
    check_shardable,
    local_shard,
    local_shards,
    step_on_dtensors,
    step_on_local_shards,
)
from vitkernels.parallel.replicated_params import ReplicatedGradients, parameters_to_replicate
from vitkernels.parallel.torchrun import TorchrunProcesses
from vitkernels.runtime import Runtime

log = logging.getLogger("vitkernels")

_SLOW_WITH_GRAPHS = "a step of fsdp took 172 ms with them and 38 ms without (notes/parallel.md)"


class Fsdp(TorchrunProcesses):
    """Each process holds a shard of every parameter, gradient and optimizer state, and gathers parameters to use them.

    gather: the precision in which parameters are gathered.
        "fp32": computes what one process computes, in the same precision.
        "auto": the same bits at half the bytes if the precision is bf16. Weights that autocast would round are rounded
            before they travel, and the few other parameters are replicated (replicated_params.py). "auto" equals
            "fp32" for fp16, whose GradScaler does not support a mix of sharded and unsharded tensors, and for models
            with layers that autocast does not round, such as 8-bit ones.
        "bf16": rounds every parameter before use, including those that autocast keeps in float32. The residual stream
            takes its dtype from the position embedding and becomes bfloat16. (Keeping only the stream in float32 does
            not work, because LayerNorm on CPUs rejects weights narrower than its input.)
    reshard: free a block's gathered parameters between forward and backward and gather them twice; implies overlap,
        since it works block by block.
    """

    name = "fsdp"

    def __init__(
        self,
        runtime: Runtime,
        lost_after: float,
        overlap: bool | None = None,
        reduce: str = "fp32",
        gather: str = "auto",
        reshard: bool = False,
    ):
        super().__init__(runtime, lost_after, reshard or overlap, reduce)
        self.gather_precision = gather
        self.reshard = reshard
        with self._leave_on_error():
            self.mesh = dist.device_mesh.init_device_mesh(self.device.type, (self.world,), mesh_dim_names=("data",))
        self._rounds: bool | None = None  # whether gather="auto" rounds; None before the first model

    def no_cuda_graphs(self) -> str | None:
        return _SLOW_WITH_GRAPHS

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        replicated = self._replicated(model)
        gathers_rounded = replicated is not None or self.gather_precision == "bf16"
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if gathers_rounded else None,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,
        )
        settings: dict[str, Any] = {
            "mesh": self.mesh,
            "mp_policy": policy,
            "reshard_after_forward": self.reshard,
            "ignored_params": None if replicated is None else set(replicated),
        }
        if uses_cuda_graphs(compile_options(compiled, mode)):
            raise UsageError(
                f"fsdp does not support CUDA graphs (torch.compile mode {mode!r}): {_SLOW_WITH_GRAPHS}. "
                "Use the default mode, max-autotune-no-cudagraphs, or ddp",
                code="parallel.cuda_graphs",
                mode=mode,
            )
        if compiled:
            self._compile(model, mode)
        blocks: Any = model.blocks if self.overlap else ()
        for block in blocks:
            fully_shard(block, **settings)
        net: Any = fully_shard(model, **settings)
        net.replicated_gradients = ReplicatedGradients(net, replicated or [], self.reduce_dtype)
        return net

    def _replicated(self, model: nn.Module) -> list[nn.Parameter] | None:
        """Return the parameters to replicate; None if all are sharded and travel in one precision.

        Once a model cannot be rounded, later models are not rounded either: they may be its EMA, which must be sharded
            alike, although its layers are plain where the trained ones multiply in 8 bits.
        """
        if self.gather_precision != "auto" or self.runtime.precision != "bf16":
            return None
        replicated = parameters_to_replicate(model)
        rounds = replicated is not None and self._rounds is not False
        if rounds != self._rounds:
            what = "weights are gathered in bf16" if rounds else "parameters are gathered in fp32"
            log.info("gather='auto': %s", what)
        self._rounds = rounds
        return replicated if rounds else None

    @contextlib.contextmanager
    def accumulating(self, net: nn.Module, last: bool) -> Iterator[None]:
        sharded: Any = net  # as `wrap` returns it
        sharded.set_requires_gradient_sync(last)
        sharded.replicated_gradients.last = last
        yield

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer = getattr(optimizer, "_base_optimizer", optimizer)  # Lookahead wraps the optimizer with the state
        check_shardable(optimizer)
        if type(optimizer) in ELEMENTWISE:
            step_on_local_shards(optimizer)
        else:
            step_on_dtensors(optimizer, self.mesh)

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float | None, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        parameters = list(parameters)
        with local_shards(parameters) as shards:
            # Every process holds replicated parameters; only the main one counts them.
            counted = [isinstance(parameter, DTensor) or self.is_main for parameter in parameters]
            gradients = [shard.grad for shard in itertools.compress(shards, counted) if shard.grad is not None]
            squared = nn.utils.get_total_norm(gradients).square().to(self.device)  # no tensors: norm on CPU
            dist.all_reduce(squared)
            norm = squared.sqrt()
            if limit:
                nn.utils.clip_grads_with_norm_(shards, limit, norm)
        return norm

    @torch.no_grad()
    def update_ema(self, ema: nn.Module, model: nn.Module, step: int) -> None:
        """Update the EMA on local shards: ema.update does not support a mix of sharded and unsharded tensors."""
        timm_ema: Any = ema
        averages, values = ([local_shard(t) for t in m.state_dict().values()] for m in (timm_ema.module, model))
        floating = [average.is_floating_point() for average in averages]
        averaged = [list(itertools.compress(tensors, floating)) for tensors in (averages, values)]
        torch._foreach_lerp_(averaged[0], averaged[1], weight=1.0 - timm_ema.get_decay(step))
        for average, value, is_averaged in zip(averages, values, floating, strict=True):
            if not is_averaged:
                average.copy_(value)

    def full(self, tensor: Tensor) -> Tensor:
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
