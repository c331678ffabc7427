"""Steps and norms on this process's parts of FSDP2's parameters, as plain tensors, beside parameters that are whole.

A DTensor costs the host time at every operation, with some 150 parameters more than the GPU needs for the step itself.
What treats every element alone gives the same on the parts. They are asked for anew each time, for FSDP2 may put
another tensor in the place of a part that is smaller than others' at its first forward pass.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

# Those that treat every element alone; written out, for one that does not (LAMB, LARS, Adafactor, Muon, and any of
# timm's with `caution`: they take norms or means of a whole parameter) would be wrong on parts without a word. All
# others work on the DTensors, which know what is whole.
ELEMENTWISE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.Adadelta,
}  # fmt: skip


def part_of(tensor: Tensor) -> Tensor:
    """This process's part of a DTensor, of which without autograd it is the very tensor; any other as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def parts_of(parameters: Iterable[nn.Parameter]) -> contextlib.AbstractContextManager[list[Tensor]]:
    """This process's parts of DTensor parameters, with those of their gradients; they share the parameters' memory.

    A part can have no elements, where a parameter has fewer rows than there are processes. Other parameters are given
    as they are.
    """
    return _stand_ins(parameters, part_of)


@contextlib.contextmanager
def _stand_ins(parameters: Iterable[nn.Parameter], stand_in: Callable[[Tensor], Tensor]) -> Iterator[list[Tensor]]:
    originals = list(parameters)
    with torch.no_grad():  # in which to_local gives the very tensor, and no view of it
        others = [stand_in(original) for original in originals]
        pairs = [(other, original) for other, original in zip(others, originals, strict=True) if other is not original]
        for other, original in pairs:
            other.grad = None if original.grad is None else stand_in(original.grad)
        try:
            yield others
        finally:
            for other, _ in pairs:
                other.grad = None  # zero_grad knows only the parameter's own


def step_on_parts(optimizer: torch.optim.Optimizer) -> None:
    """From now on a step of an optimizer in ELEMENTWISE works on parts; outside of it everything is as it was.

    Its state too is of DTensors outside: checkpoints, and whoever reads it, see no difference.
    """
    _step_on(optimizer, part_of, _as_the_whole)


def step_on_dtensors(optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> None:
    """From now on a step of any optimizer has a DTensor, replicated, for each whole parameter, and so no mix of kinds.

    Outside of it everything is as it was.
    """

    def as_dtensor(tensor: Tensor) -> Tensor:
        is_dtensor = isinstance(tensor, DTensor) or not tensor.dim()  # what a step counts goes with any
        return tensor if is_dtensor else DTensor.from_local(tensor.detach(), mesh, [Replicate()], run_check=False)

    _step_on(optimizer, as_dtensor, lambda value, *_: part_of(value))


def _step_on(optimizer: torch.optim.Optimizer, stand_in: Callable[[Tensor], Tensor], restored: Callable) -> None:
    step = contextlib.ExitStack()

    def begin(*_):
        step.close()  # a step that an error ended
        step.enter_context(_exchanged(optimizer, stand_in, restored))

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(lambda *_: step.close())


@contextlib.contextmanager
def _exchanged(optimizer: torch.optim.Optimizer, stand_in: Callable, restored: Callable) -> Iterator[None]:
    """In it the optimizer has `stand_in` of its parameters, their gradients and state, which share their memory.

    restored(tensor, other, original) is what `original` has in its state where its stand-in `other` has `tensor`.
    """
    state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
    originals = [original for group in groups for original in group]
    with _stand_ins(originals, stand_in) as others:
        optimizer.state = defaultdict(dict)
        for other, original in zip(others, originals, strict=True):
            if other is original and original in state:
                optimizer.state[other] = state[original]
            elif original in state:
                entries = state[original].items()
                optimizer.state[other] = {k: stand_in(v) if isinstance(v, Tensor) else v for k, v in entries}
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
                    _put_back(state[original], optimizer.state[other], other, original, restored)
            optimizer.state = state


def _put_back(entries: dict, of_other: dict, other: Tensor, original: Tensor, restored: Callable) -> None:
    """A parameter's state after a step: entries that are new, or another tensor now."""
    for name, value in of_other.items():
        old = entries.get(name)
        if isinstance(value, Tensor) and (old is None or part_of(old) is not part_of(value)):
            entries[name] = restored(value, other, original)
        elif not isinstance(value, Tensor):
            entries[name] = value


def _as_the_whole(value: Tensor, part: Tensor, whole: DTensor) -> Tensor:
    """A DTensor, if value is a part as `part` is. What a step counts has no dimension; FSDP2's parameters have one."""
    if not value.dim() or value.shape != part.shape:
        return value
    size = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(value, whole.device_mesh, whole.placements, run_check=False, **size)
