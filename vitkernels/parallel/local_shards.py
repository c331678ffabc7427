"""Optimizer steps and norms on this process's shards of FSDP2's parameters, as plain tensors.

Every operation on a DTensor takes host time, which for 150 parameters or more exceeds the GPU time of the step.
Elementwise operations give the same result on local shards. Every step looks up the shards again: at the first
forward pass FSDP2 may replace a shard that is smaller than those of other processes.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from vitkernels.errors import UsageError

# Optimizers that treat each element independently. The list is explicit because any other optimizer (LAMB, LARS,
# Adafactor, Muon, any of timm's with `caution`) takes norms or means of a parameter and would be silently wrong on
# shards. Those step on DTensors, which reduce over all shards.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
}  # fmt: skip


# Optimizers that call operations which DTensors do not have: clamp_min_ (AdamP, SGDP) and compiled einsums (Kron).
UNSHARDABLE = {"timm.optim.adamp.AdamP", "timm.optim.kron.Kron", "timm.optim.sgdp.SGDP"}


def check_shardable(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer in UNSHARDABLE, which would fail in its first step."""
    kind = type(optimizer)
    if any(f"{base.__module__}.{base.__qualname__}" in UNSHARDABLE for base in kind.__mro__):
        names = sorted(name.rpartition(".")[2] for name in UNSHARDABLE)
        raise UsageError(
            f"fsdp shards parameters, and the optimizer {kind.__name__} does not support sharded tensors (of "
            f"timm's, {', '.join(names)} do not): use ddp, or another optimizer, such as adamw, lamb, lion or muon",
            code="parallel.optimizer",
            optimizer=kind.__name__,
            unsupported=names,
        )


def local_shard(tensor: Tensor) -> Tensor:
    """Return this process's shard of a DTensor, without autograd the shard tensor itself; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_shards(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[list[Tensor]]:
    """Yield the local shards of DTensor parameters, with the shards of their gradients; all share memory with them.

    A shard is empty if its parameter has fewer rows than there are processes. Other parameters are yielded unchanged.
    """
    return _substitutes(parameters, local_shard)


@contextlib.contextmanager
def _substitutes(parameters: Iterable[nn.Parameter], substitute: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    originals = list(parameters)
    with torch.no_grad():  # with autograd to_local would return a view
        others = [substitute(original) for original in originals]
        pairs = [(other, original) for other, original in zip(others, originals, strict=True) if other is not original]
        for other, original in pairs:
            other.grad = None if original.grad is None else substitute(original.grad)
        try:
            yield others
        finally:
            for other, _ in pairs:
                other.grad = None  # zero_grad clears only the parameter's own


def step_on_local_shards(optimizer: torch.optim.Optimizer) -> None:
    """Make every step of an optimizer in ELEMENTWISE work on local shards.

    Outside of a step its parameters and state are DTensors, so checkpoints and other readers see no difference.
    """
    _step_on(optimizer, local_shard, _as_dtensor_like)


def step_on_dtensors(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """Make every step of an optimizer see replicated DTensors in place of unsharded parameters, to avoid a mix.

    Outside of a step parameters and state are unchanged.
    """

    def as_dtensor(tensor: Tensor) -> Tensor:
        is_usable = isinstance(tensor, DTensor) or not tensor.dim()  # a step count combines with either kind
        return tensor if is_usable else DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)

    _step_on(optimizer, as_dtensor, lambda value, *_: local_shard(value))


def _step_on(optimizer: torch.optim.Optimizer, substitute: Callable[[Tensor], Tensor], restore: Callable) -> None:
    step = contextlib.ExitStack()

    def begin(*_):
        step.close()  # left open by a step that raised
        step.enter_context(_substituted(optimizer, substitute, restore))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *_: step.close())


@contextlib.contextmanager
def _substituted(optimizer: torch.optim.Optimizer, substitute: Callable, restore: Callable) -> Iterator[None]:
    """Replace the optimizer's parameters, gradients and state by `substitute` of them, which share their memory.

    restore(tensor, other, original) returns the state entry of `original` for `tensor` in the state of its substitute
    `other`.
    """
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    originals = [original for group in groups for original in group]
    with _substitutes(originals, substitute) as others:
        optimizer.state = defaultdict(dict)
        for other, original in zip(others, originals, strict=True):
            if other is original and original in state:
                optimizer.state[other] = state[original]
            elif original in state:
                entries = state[original].items()
                optimizer.state[other] = {k: substitute(v) if isinstance(v, Tensor) else v for k, v in entries}
        rest = iter(others)
        for group in optimizer.param_groups:
            group["params"] = [next(rest) for _ in group["params"]]
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = own
            for other, original in zip(others, originals, strict=True):
                if other is original and other in optimizer.state:
                    state[original] = optimizer.state[other]
                elif other in optimizer.state:
                    _put_back(state[original], optimizer.state[other], other, original, restore)
            optimizer.state = state


def _put_back(entries: dict, of_other: dict, other: Tensor, original: Tensor, restore: Callable) -> None:
    """Copy back the state entries that a step created or replaced."""
    for name, value in of_other.items():
        old = entries.get(name)
        if isinstance(value, Tensor) and (old is None or local_shard(old) is not local_shard(value)):
            entries[name] = restore(value, other, original)
        elif not isinstance(value, Tensor):
            entries[name] = value


def _as_dtensor_like(value: Tensor, shard: Tensor, parameter: DTensor) -> Tensor:
    """Return `value` as a DTensor like `parameter` if it has its shard's shape; a step count (0-dim) as it is."""
    if not value.dim() or value.shape != shard.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
