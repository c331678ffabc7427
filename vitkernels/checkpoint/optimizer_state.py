"""An optimizer's state under its parameters' names, as tensors and plain values: what a checkpoint can hold.

Numbers of parameters change with what is frozen and how parameters are grouped; their names do not, nor do they with
the number of processes that share them.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vitkernels.checkpoint.checkpoints import load_tensors
from vitkernels.errors import UsageError


def check(optimizer: torch.optim.Optimizer, name: str) -> None:
    """UsageError, now or in the first step, when `optimizer` (optim.opt=`name`) cannot be trained or saved here.

    What it keeps is there only after a step; found at the first checkpoint, all until then would be lost.
    """
    mend = "most other optimizers of timm's can be trained and saved, e.g. optim.opt=adamw"
    inner = getattr(optimizer, "_base_optimizer", optimizer)  # of Lookahead: it has the state
    if getattr(inner, "is_second_order", False):
        raise UsageError(f"optim.opt={name} needs second derivatives, which are not computed here; {mend}")
    checked = False  # a hook that removed itself would disturb those after it

    def check_once(*_) -> None:
        nonlocal checked
        if checked:
            return
        state = inner.state_dict()
        try:
            for entries in [*state["state"].values(), _rest(state)]:
                for entry, value in entries.items():
                    _as_json(value, entry, {})
        except TypeError as error:
            raise UsageError(f"optim.opt={name} cannot be saved in checkpoints: {error}; {mend}") from error
        checked = True

    inner.register_step_post_hook(check_once)


def pack(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors by "parameter/entry", the rest) of an optimizer over the model's parameters.

    Lists and tuples of tensors are in the rest, with the names of their tensors, "parameter/entry.0" and so on.
    TypeError: of what neither tensors nor JSON can hold.
    """
    names = _names(optimizer, model)
    state = optimizer.state_dict()
    tensors, values = {}, {}
    for number, entries in state["state"].items():
        for entry, value in entries.items():
            name = f"{names[number]}/{entry}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value
            else:
                values[name] = _as_json(value, name, tensors)
    groups = [
        {k: v.item() if isinstance(v, torch.Tensor) else v for k, v in group.items() if _is_count(k)}
        | {"params": [names[number] for number in group["params"]]}
        for group in state["param_groups"]
    ]
    rest = {entry: _as_json(value, entry, tensors) for entry, value in _rest(state).items()}
    return tensors, {"groups": groups, "values": values, "rest": rest}


def load(
    optimizer: torch.optim.Optimizer, model: nn.Module, path: Path, rest: dict, read: Callable = load_tensors
) -> None:
    """Restore what `pack` gave from the checkpoint at `path`; UsageError when parameters were grouped otherwise.

    read: called as checkpoint.load_tensors.
    Of a group only what it counts ("step", Lookahead's "lookahead_step") comes from the checkpoint: weight decay, betas
    and the like are settings, and stay those that the optimizer was made with.
    """
    names = _names(optimizer, model)
    numbers = {name: number for number, name in enumerate(names)}
    try:
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in rest["groups"]]
        ours = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        if [group["params"] for group in groups] != ours:
            raise ValueError("its parameters are grouped otherwise")
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            group |= {k: v for k, v in own.items() if k != "params" and not _is_count(k)}
            # LAMB counts its steps in a tensor.
            group |= {k: torch.as_tensor(group[k]).to(v) for k, v in own.items() if isinstance(v, torch.Tensor)}
        parameters = dict(model.named_parameters())
        stored = read(path, "optimizer", _Like(parameters))
        values = {name: _from_json(value, stored) for name, value in rest["values"].items()}
        whole = {entry: _from_json(value, stored) for entry, value in rest.get("rest", {}).items()}
        state: dict[int, dict] = {}
        for name, value in {**stored, **values}.items():
            parameter, _, entry = name.rpartition("/")
            state.setdefault(numbers[parameter], {})[entry] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups, **whole})
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the optimizer state in {path} does not fit: {error}. Give the optim.* settings it was made with, "
            "or start anew from its weights alone with checkpoint=PATH"
        ) from error


class _Like(dict):
    """An entry of a parameter's state is shared among processes as the parameter is."""

    def get(self, name: str, default=None):
        return super().get(name.rpartition("/")[0], default)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """The parameters' names in the order by which the optimizer numbers them."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _is_count(key: str) -> bool:
    """Whether a group's entry is what it counts; the others are settings."""
    return key.endswith("step")


def _rest(state: dict) -> dict:
    """What a state dict has for the whole optimizer, such as Kron's generator of random numbers."""
    return {entry: value for entry, value in state.items() if entry not in ("state", "param_groups")}


def _as_json(value, name: str, tensors: dict[str, torch.Tensor]):
    """`value` as JSON can hold it; the tensors in it are put into `tensors`, under `name` or names that begin so."""
    if isinstance(value, torch.Tensor):
        tensors[name] = value
        return {"tensor": name}
    if type(value) in (list, tuple):
        items = [_as_json(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"its state {name} is of type {type(value).__name__}")


def _from_json(value, tensors: dict[str, torch.Tensor]):
    """What `_as_json` was given; the tensors in it are taken out of `tensors`."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        return tensors.pop(value["tensor"]) if "tensor" in value else tuple(_from_json(value["tuple"], tensors))
    return value
