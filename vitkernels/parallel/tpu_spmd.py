"""TPU chips of one host as one SPMD program over a mesh, which XLA partitions; tpu_multihost.py adds more hosts.

Sources: Xu et al., "GSPMD" (arXiv:2105.04663); PyTorch/XLA's user guide on SPMD and its FSDPv2. Unlike FSDPv2's wrapper
this leaves modules, and so parameter names, unchanged.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitkernels.parallel.base import Parallel
from vitkernels.runtime import Runtime


class SpmdDdp(Parallel):
    """Every chip holds a replica of the model and its shard of each batch, on which Pallas kernels run."""

    name = "ddp"
    one_program = True

    def __init__(self, runtime: Runtime):
        super().__init__(runtime)
        import torch_xla.distributed.spmd as spmd

        self._spmd = spmd
        chips = self._mesh_chips()
        self.local_devices = len(chips) // self.world
        self.mesh = spmd.Mesh(np.array(chips), (len(chips),), ("data",))
        spmd.set_global_mesh(self.mesh)

    def _mesh_chips(self) -> list[int]:
        """Return all chips by torch_xla's numbers, in the order in which they receive the rows of a batch."""
        import torch_xla.runtime as xr

        return list(range(xr.global_runtime_device_count()))

    def describe(self) -> str:
        return f"{self.name}, SPMD over {self.devices} devices"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        for parameter in model.parameters():
            self._shard(parameter, None)
        return super().wrap(model, compiled, mode)

    def feed(self, batches) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield batches with each chip's rows on that chip; a process holds only its own chips' rows (`minibatch`)."""
        several = self.world > 1
        runtime: Any = self.runtime  # an XlaRuntime
        return runtime.feed(
            batches, lambda rank: self._spmd.ShardingSpec(self.mesh, ("data", *[None] * (rank - 1)), minibatch=several)
        )

    def _shard(self, tensor: Tensor, dimension: int | None) -> None:
        """Shard one dimension over the mesh; None replicates the tensor on every chip."""
        axes = tuple("data" if i == dimension else None for i in range(tensor.dim()))
        self._spmd.mark_sharding(tensor, self.mesh, axes)


class SpmdFsdp(SpmdDdp):
    """Every chip holds a shard of each parameter, gradient and optimizer state, and its shard of each batch.

    A parameter is sharded along its longest dimension, and XLA gathers it where it is used. Layer outputs and their
    gradients are pinned to sharding by images: XLA would otherwise shard some of them by channels, as the weights are,
    and send activations between chips in place of weights.
    """

    name = "fsdp"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        for parameter in model.parameters():
            self._shard_longest(parameter)
        for layer in model.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(lambda layer, inputs, output: self._shard_by_images(output))
        return Parallel.wrap(self, model, compiled, mode)

    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for tensor in state.values():
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    self._shard_longest(tensor)

    def _shard_longest(self, tensor: Tensor) -> None:
        self._shard(tensor, int(np.argmax(tensor.shape)) if tensor.dim() else None)

    def _shard_by_images(self, output):
        if not isinstance(output, Tensor):  # a fused layer may return several
            return type(output)(map(self._shard_by_images, output))
        return self._spmd.mark_sharding_with_gradients(output, self.mesh, ("data", *[None] * (output.dim() - 1)))
