"""Strategy interface between the training loop and single-device, DDP, FSDP and SPMD execution."""

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.runtime import Runtime


class Parallel:
    """The strategy for one process on one device.

    Subclasses override the methods that differ for several processes or devices.

    rank, world: this process's rank and the number of processes.
    local_devices: devices fed by this process; the batch size is per device.
    one_program: all processes run one program over all devices (SPMD). Results then cover the global batch and
        are equal on every process, and every input except the images, such as a random draw, must be equal too.
    checkpoint_group: a process group reserved for the thread that writes checkpoints; None if one process writes.
    """

    name = "none"
    rank, world = 0, 1
    local_devices = 1
    one_program = False
    checkpoint_group = None

    def __init__(self, runtime: Runtime):
        self.runtime = runtime

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes files and logs."""
        return self.rank == 0

    @property
    def devices(self) -> int:
        """Number of devices over all processes."""
        return self.world * self.local_devices

    @property
    def stream(self) -> int:
        """Index of the random stream that this process draws from."""
        return 0 if self.one_program else self.rank

    @property
    def writes(self) -> bool:
        """Whether this process writes part of a checkpoint; with one program the main process writes all of it."""
        return self.is_main or not self.one_program

    def describe(self) -> str:
        return "one device"

    # ---- the model ----

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        """Return the module to call in place of `model`, compiled by torch.compile (in `mode`) if `compiled`.

        Parameters may be replaced by shards of them, so create the optimizer afterwards.
        """
        return self.runtime.compile(model, mode) if compiled else model

    def no_cuda_graphs(self) -> str | None:
        """Return why compiled models should not record CUDA graphs; None if they may."""
        return None

    def accumulating(self, net: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Surround forward and backward of one micro-batch; only the last one all-reduces gradients."""
        return contextlib.nullcontext()

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the steps of a new optimizer cheaper on this strategy's parameters, without changing their result."""

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float | None, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        """Return the global gradient norm, on the device, and scale gradients down to `limit` if it is larger.

        limit: None leaves gradients unchanged. All processes must call this, and all get the same norm.
        optimizer: the optimizer that steps next; one that can clip while it reads gradients does the scaling itself.
        """
        parameters = list(parameters)
        # Unnamed on purpose: a list that stays alive would make the gradients outputs of torch_xla's graph.
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit and optimizer is not None and hasattr(optimizer, "clip_next_step"):
            optimizer.clip_next_step(norm, limit)
        elif limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def update_ema(self, ema: nn.Module, model: nn.Module, step: int) -> None:
        """Update timm's ModelEmaV3, whose module is wrapped as `model` is, with this step's weights."""
        averaged: Any = ema
        averaged.update(model, step)

    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Shard an optimizer's state, as loaded from a checkpoint, the way its parameters are sharded."""

    def full(self, tensor: Tensor) -> Tensor:
        """Return the unsharded tensor. All processes must call this."""
        return tensor

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the model's unsharded state dict on the CPU. All processes must call this."""
        return {name: self.full(tensor).detach().cpu() for name, tensor in model.state_dict().items()}

    def feed(self, batches):
        """Yield the batches on this process's devices."""
        return self.runtime.feed(batches)

    # ---- communication on the host, never through the device ----

    def agree(self, requested: bool) -> bool:
        """Return whether any process requested something; all get the same answer at the same step. Call once a step.

        With several processes the answer covers the previous step's requests.
        """
        return requested

    def gather(self, value) -> list:
        """Return every process's value, a plain Python object, by rank. All processes must call this."""
        return [value]

    def shares(self, value) -> list:
        """Return a value read from the device, by rank, or in a list of one if it already covers the global batch.

        All processes must call this.
        """
        return [value] if self.one_program else self.gather(value)

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Return each count, read from the device, summed over all processes. All processes must call this."""
        shares = self.shares(values)
        return {name: sum(share[name] for share in shares) for name in values}

    def expect_same(self, what: str, value, fix: str) -> None:
        """Raise UsageError on all processes unless all have the same value of `what`. All must call this.

        fix: what the user should do about a difference; it ends the message.
        """
        everyone = self.gather(value)
        others = [rank for rank, one in enumerate(everyone) if one != everyone[0]]
        if others:
            ranks = ", ".join(map(str, others))
            message = f"{what} on rank {ranks} differ from rank 0: {fix}"
            raise UsageError(message, code="parallel.mismatch", what=what, ranks=others)

    def on_main(self, function: Callable, *args):
        """Run `function(*args)` on the main process and return its result on all; an error there raises on all."""
        return function(*args)

    def load(self, function: Callable, *args):
        """Run `function(*args)`, which reads the run's files, on each process, or on the main one for one program.

        With one program the result is then guaranteed to be equal everywhere, and only one host needs the files.
        """
        return self.on_main(function, *args) if self.one_program else function(*args)

    # ---- lifetime ----

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave together with the other processes, unless an error ends this one."""
