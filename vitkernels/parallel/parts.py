"""Steps and norms on this process's parts of FSDP2's parameters, as plain tensors.

A DTensor costs the host time at every operation, with some 150 parameters more than the GPU needs for the step itself.
What treats every element alone gives the same on the parts. They are asked for anew each time, for FSDP2 may put
another tensor in the place of a part that is smaller than others' at its first forward pass.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

# Those that treat every element alone; written out, for one that does not (LAMB, LARS, Adafactor, Muon, and any of
# timm's with `caution`: they take norms or means of a whole parameter) would be wrong on parts without a word. All
# others work on the DTensors, which know what is whole.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
}  # fmt: skip


@contextlib.contextmanager
def parts_of(parameters: Iterable[nn.Parameter]) -> Iterator[list[Tensor]]:
    """This process's parts of DTensor parameters, with those of their gradients; they share the parameters' memory.

    A part can have no elements, where a parameter has fewer rows than there are processes.
    """
    wholes = list(parameters)
    with torch.no_grad():  # in which to_local gives the very tensor, and no view of it
        parts = [whole.to_local() for whole in wholes]
        for part, whole in zip(parts, wholes, strict=True):
            part.grad = None if whole.grad is None else whole.grad.to_local()
        try:
            yield parts
        finally:
            for part in parts:
                part.grad = None  # zero_grad knows only the parameter's own


def step_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """From now on a step of an optimizer in ELEMENTWISE works on parts; outside of it everything is as it was.

    Its state too is of DTensors outside: checkpoints, and whoever reads it, see no difference.
    """
    step = contextlib.ExitStack()
    optimizer.register_step_pre_hook(lambda *_: step.enter_context(_on_parts(optimizer)))
    optimizer.register_step_post_hook(lambda *_: step.close())


@contextlib.contextmanager
def _on_parts(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    wholes = [whole for group in groups for whole in group]
    with parts_of(wholes) as parts:
        optimizer.state = defaultdict(dict)
        for part, whole in zip(parts, wholes, strict=True):
            if whole in state:
                entries = state[whole].items()
                optimizer.state[part] = {k: v.to_local() if isinstance(v, DTensor) else v for k, v in entries}
        rest = iter(parts)
        for group in optimizer.param_groups:
            group["params"] = [next(rest) for _ in group["params"]]
        try:
            yield
        finally:
            for group, own in zip(optimizer.param_groups, groups, strict=True):
                group["params"] = own
            for part, whole in zip(parts, wholes, strict=True):
                if part in optimizer.state:
                    _put_back(state[whole], optimizer.state[part], part, whole)
            optimizer.state = state


def _put_back(entries: dict, of_part: dict, part: Tensor, whole: DTensor) -> None:
    """A parameter's state after a step: entries that are new, or another tensor now, as DTensors where they are parts.

    What a step counts has no dimension, and FSDP2's parameters have one at least.
    """
    for name, value in of_part.items():
        old = entries.get(name)
        if isinstance(old, DTensor) and old.to_local() is value:
            continue
        if isinstance(value, Tensor) and value.dim() and value.shape == part.shape:
            size = {"shape": whole.shape, "stride": whole.stride()}
            value = DTensor.from_local(value, whole.device_mesh, whole.placements, run_check=False, **size)
        entries[name] = value
