"""What the training loop asks of the processes and devices that train together. One subclass per way to share work."""

import contextlib
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from vitkernels.errors import UsageError
from vitkernels.runtime import Runtime


class Parallel:
    """One process on one device: the methods are the identities that a single process needs.

    rank, world: of this process among all. local_devices: devices that this process feeds; data.batch_size is for each.
    one_program: all processes run one program over all devices (SPMD). What it computes is of all their images, and the
    same for each of them; so must be all that they give it beside their images, such as what they draw at random.
    checkpoint_group: a process group of its own for a thread that writes checkpoints; None where one process writes.
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
        """Whether this is the one process that writes files and talks."""
        return self.rank == 0

    @property
    def devices(self) -> int:
        """Devices of all processes."""
        return self.world * self.local_devices

    @property
    def stream(self) -> int:
        """The number of the random streams that this process draws from."""
        return 0 if self.one_program else self.rank

    @property
    def writes(self) -> bool:
        """Whether this process has something to write of a checkpoint: of one program the main process has it all."""
        return self.is_main or not self.one_program

    def describe(self) -> str:
        return "one device"

    # ---- the model ----

    def wrap(self, model: nn.Module, compiled: bool = False, mode: str | None = None) -> nn.Module:
        """What to call instead of `model`, through torch.compile (in its `mode`) if `compiled`.

        Parameters may be replaced, by parts of them: the optimizer is to be made afterwards.
        """
        return self.runtime.compile(model, mode) if compiled else model

    def accumulating(self, net: nn.Module, last: bool) -> contextlib.AbstractContextManager:
        """Around forward and backward of one of a step's batches: gradients are shared with the last one alone."""
        return contextlib.nullcontext()

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Make a new optimizer's steps cheap for parameters as they are here; their result stays the same."""

    def clip_gradients(
        self, parameters: Iterable[nn.Parameter], limit: float | None, optimizer: torch.optim.Optimizer | None = None
    ) -> Tensor:
        """The norm of all gradients together, on the device; they are then scaled down to `limit` where it is more.

        limit: None leaves them as they are. The same on all processes, and all must call it.
        optimizer: whose step comes next. One that can clip gradients as it reads them is left to do so.
        """
        parameters = list(parameters)
        # This list has no name: one that lived on would make the gradients outputs of torch_xla's graph.
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if limit and hasattr(optimizer, "clip_next_step"):
            optimizer.clip_next_step(norm, limit)
        elif limit:
            nn.utils.clip_grads_with_norm_(parameters, limit, norm)
        return norm

    def update_ema(self, ema: nn.Module, model: nn.Module, step: int) -> None:
        """Have timm's ModelEmaV3, of a model wrapped as `model` is, take in this step's weights."""
        ema.update(model, step)

    def place_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer's state, as it comes from a checkpoint, the places that its parameters have."""

    def full(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor of which each process may hold a part. All processes must call it."""
        return tensor

    def full_state_dict(self, model: nn.Module) -> dict[str, Tensor]:
        """The model's whole state dict on the CPU. All processes must call it."""
        return {name: self.full(tensor).detach().cpu() for name, tensor in model.state_dict().items()}

    def feed(self, batches):
        """The batches on this process's devices."""
        return self.runtime.feed(batches)

    # ---- talking: on the host, never through the device ----

    def agree(self, asked: bool) -> bool:
        """Whether any process asked for something: the same answer for all, at the same step. Called once a step."""
        return asked

    def gather(self, value) -> list:
        """Every process's value, by rank; plain Python objects. All processes must call it."""
        return [value]

    def shares(self, value) -> list:
        """A value from the device, of each process's images, by rank; a single one where it is of all images already.

        All processes must call it.
        """
        return [value] if self.one_program else self.gather(value)

    def total(self, values: dict[str, float]) -> dict[str, float]:
        """Each of these counts, read from the device, for the images of all processes. All processes must call it."""
        shares = self.shares(values)
        return {name: sum(share[name] for share in shares) for name in values}

    def expect_same(self, what: str, value, mend: str) -> None:
        """Raise UsageError, on all processes, unless each of them has this value of `what`. All must call it."""
        everyone = self.gather(value)
        others = ", ".join(str(rank) for rank, one in enumerate(everyone) if one != everyone[0])
        if others:
            raise UsageError(f"{what} on rank {others} and on rank 0 are not the same: {mend}")

    def on_main(self, function: Callable, *args):
        """`function(*args)`, run by the main process alone: its result for all. An error there is an error for all."""
        return function(*args)

    def load(self, function: Callable, *args):
        """`function(*args)`, which reads files of the run: each process what it needs, or the main one for all.

        The latter for one program: what each gives it is then surely the same, and only one host needs the files.
        """
        return self.on_main(function, *args) if self.one_program else function(*args)

    # ---- beginning and end ----

    def __enter__(self) -> "Parallel":
        return self

    def __exit__(self, kind, error, trace) -> None:
        """Leave together, unless an error ends this process."""
