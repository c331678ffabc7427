"""Convert an optimizer's state to tensors and plain values under its parameters' names, for checkpoints.

The numbers that torch assigns to parameters depend on which are frozen, how they are grouped and how many processes
shard them. Their names do not.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from vitkernels.checkpoint.checkpoints import load_tensors
from vitkernels.errors import UsageError


def check(optimizer: torch.optim.Optimizer, name: str) -> None:
    """Raise UsageError, now or in the first step, if the optimizer `name` cannot train here or be saved.

    Optimizers create their state in the first step. An error at the first checkpoint would lose all steps up to it.
    """
    fix = "use another of timm's optimizers, such as adamw"
    inner = getattr(optimizer, "_base_optimizer", optimizer)  # Lookahead wraps the optimizer that has the state
    if getattr(inner, "is_second_order", False):
        raise UsageError(
            f"optimizer {name!r} needs second derivatives, which are not computed here; {fix}",
            code="optimizer.second_order",
            name=name,
        )
    checked = False  # a hook that removes itself would disturb the hooks after it

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
            raise UsageError(
                f"the state of optimizer {name!r} cannot be saved in checkpoints: {error}; {fix}",
                code="optimizer.not_savable",
                name=name,
            ) from error
        checked = True

    inner.register_step_post_hook(check_once)


def pack(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, torch.Tensor], dict]:
    """Return (tensors by "parameter/entry", JSON-serializable rest) of an optimizer over the model's parameters.

    Lists and tuples of tensors appear in the rest as the names of their tensors, "parameter/entry.0" and so on.
    Raises TypeError for state that neither tensors nor JSON can hold.
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
    """Restore what `pack` returned from the checkpoint at `path`.

    Of a parameter group, only its counters ("step", Lookahead's "lookahead_step") come from the checkpoint. Weight
    decay, betas and the like are settings: they keep the values that the optimizer was created with.

    Args:
        rest: the second value that `pack` returned.
        read: a function with the signature of `load_tensors`.

    Raises:
        UsageError: the parameters are grouped differently than in the checkpoint.
    """
    names = _names(optimizer, model)
    numbers = {name: number for number, name in enumerate(names)}
    try:
        groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in rest["groups"]]
        ours = [group["params"] for group in optimizer.state_dict()["param_groups"]]
        if [group["params"] for group in groups] != ours:
            raise ValueError("its parameters are grouped differently")
        for group, own in zip(groups, optimizer.param_groups, strict=True):
            group |= {k: v for k, v in own.items() if k != "params" and not _is_count(k)}
            # LAMB counts its steps in a tensor.
            group |= {k: torch.as_tensor(group[k]).to(v) for k, v in own.items() if isinstance(v, torch.Tensor)}
        parameters = dict(model.named_parameters())
        stored = read(path, "optimizer", _Like(parameters))
        values = {name: _from_json(value, stored) for name, value in rest["values"].items()}
        other = {entry: _from_json(value, stored) for entry, value in rest.get("rest", {}).items()}
        state: dict[int, dict] = {}
        for name, value in {**stored, **values}.items():
            parameter, _, entry = name.rpartition("/")
            state.setdefault(numbers[parameter], {})[entry] = value
        optimizer.load_state_dict({"state": state, "param_groups": groups, **other})
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the optimizer state in {path} does not fit this optimizer: {error}. Use the optimizer settings it was "
            "trained with, or start a new run from its weights alone",
            code="optimizer.state_mismatch",
            path=path,
        ) from error


class _Like(dict):
    """Map an entry of a parameter's state to the parameter: both are sharded alike."""

    def get(self, name: str, default=None):
        return super().get(name.rpartition("/")[0], default)


def _names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Return the parameters' names in the order in which the optimizer numbers them."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return [by_id[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def _is_count(key: str) -> bool:
    """Return whether a group's entry is a counter; all others are settings."""
    return key.endswith("step")


def _rest(state: dict) -> dict:
    """Return the entries of a state dict that belong to no parameter, such as Kron's random generator."""
    return {entry: value for entry, value in state.items() if entry not in ("state", "param_groups")}


def _as_json(value, name: str, tensors: dict[str, torch.Tensor]):
    """Return `value` in JSON-serializable form; add its tensors to `tensors` as `name` or `name`.INDEX."""
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
    """Return the value that `_as_json` converted; its tensors are removed from `tensors`."""
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if isinstance(value, dict):
        return tensors.pop(value["tensor"]) if "tensor" in value else tuple(_from_json(value["tuple"], tensors))
    return value
