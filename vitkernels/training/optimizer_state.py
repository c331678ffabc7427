"""An optimizer's state under its parameters' names, as tensors and plain values: what a checkpoint can hold.

Numbers of parameters change with what is frozen and how parameters are grouped; their names do not, nor do they with
the number of processes that share them.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vitkernels.errors import UsageError
from vitkernels.training.checkpoint import load_tensors


def pack(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict]:
    """(tensors by "parameter/entry", the rest) of an optimizer over the model's parameters."""
    names = _names(optimizer, model)
    state = optimizer.state_dict()
    tensors, values = {}, {}
    for number, entries in state["state"].items():
        for entry, value in entries.items():
            where = tensors if isinstance(value, torch.Tensor) else values
            where[f"{names[number]}/{entry}"] = value
    plain = [{k: v.item() if isinstance(v, torch.Tensor) else v for k, v in g.items()} for g in state["param_groups"]]
    groups = [{**group, "params": [names[number] for number in group["params"]]} for group in plain]
    return tensors, {"groups": groups, "values": values}


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
            group |= {k: v for k, v in own.items() if k != "params" and not k.endswith("step")}
            # LAMB counts its steps in a tensor.
            group |= {k: torch.as_tensor(group[k]).to(v) for k, v in own.items() if isinstance(v, torch.Tensor)}
        parameters = dict(model.named_parameters())
        stored = read(path, "optimizer", _Like(parameters))
        state: dict[int, dict] = {}
        for name, value in {**stored, **rest["values"]}.items():
            parameter, _, entry = name.rpartition("/")
            state.setdefault(numbers[parameter], {})[entry] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups})
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
