"""TPU chips: one program over a mesh of them all, which XLA partitions. One host here; several in pod.py.

Sources: Xu et al., "GSPMD" (arXiv:2105.04663); PyTorch/XLA's user guide on SPMD and its FSDPv2. Unlike FSDPv2's wrapper
this leaves the modules, and so the parameters' names, as they are.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from vitkernels.parallel.base import Parallel
from vitkernels.runtime import Runtime


class SpmdData(Parallel):
    """Every chip has the whole model and its part of each batch. Pallas kernels run on these parts (pallas_spmd.py)."""

    name = "ddp"
    one_program = True

    def __init__(self, runtime: Runtime):
        super().__init__(runtime)
        import torch_xla.distributed.spmd as spmd

        self._spmd = spmd
        chips = self._chips()
        self.local_devices = len(chips) // self.world
        self.mesh = spmd.Mesh(np.array(chips), (len(chips),), ("data",))
        spmd.set_global_mesh(self.mesh)

    def _chips(self) -> list[int]:
        """All chips, as torch_xla numbers them, in the order in which they get the rows of a batch."""
        import torch_xla.runtime as xr

        return list(range(xr.global_runtime_device_count()))

    def describe(self) -> str:
        return f"{self.name}, SPMD over {self.devices} devices"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        for parameter in model.parameters():
            self._place(parameter, None)
        return super().wrap(model, compiled, mode)

    def feed(self, batches) -> Iterator[tuple[Tensor, Tensor]]:
        """Each chip gets its rows of a batch, of which each process has those for its own chips (`minibatch`)."""
        several = self.world > 1
        return self.runtime.feed(
            batches, lambda rank: self._spmd.ShardingSpec(self.mesh, ("data", *[None] * (rank - 1)), minibatch=several)
        )

    def _place(self, tensor: Tensor, dimension: int | None) -> None:
        """Split one dimension over the mesh; None: the whole on every chip."""
        axes = tuple("data" if i == dimension else None for i in range(tensor.dim()))
        self._spmd.mark_sharding(tensor, self.mesh, axes)


class SpmdFsdp(SpmdData):
    """Every chip has a part of each parameter, of its gradient and of its optimizer state, and its part of each batch.

    A parameter is split along its longest dimension; XLA gathers it where it is used. What the layers put out, and its
    gradient, is kept split by images: left to itself, XLA would split some of it by channels, as the weights are, and
    send it between chips in place of weights.
    """

    name = "fsdp"

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        for parameter in model.parameters():
            self._split_longest(parameter)
        for layer in model.modules():
            if any(True for _ in layer.parameters(recurse=False)):
                layer.register_forward_hook(lambda layer, inputs, output: self._split_by_images(output))
        return Parallel.wrap(self, model, compiled, mode)

    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for tensor in state.values():
                if isinstance(tensor, Tensor) and tensor.shape == parameter.shape:
                    self._split_longest(tensor)

    def _split_longest(self, tensor: Tensor) -> None:
        self._place(tensor, int(np.argmax(tensor.shape)) if tensor.dim() else None)

    def _split_by_images(self, output):
        if not isinstance(output, Tensor):  # a fused layer may put out several
            return type(output)(map(self._split_by_images, output))
        return self._spmd.mark_sharding_with_gradients(output, self.mesh, ("data", *[None] * (output.dim() - 1)))
