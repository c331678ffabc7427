"""Describe one setting in a dataclass field, and read a dataclass of settings from plain values."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field
from typing import Any, Literal

from vitkernels.errors import UsageError

_KEY = "setting"  # in a field's metadata


@dataclass(frozen=True)
class Description:
    """The documentation of one setting, and the range of its numbers.

    Args:
        text: one sentence.
        unit: the unit of its numbers, if any.
        least: smallest allowed number.
        greatest: largest allowed number.
        below: exclusive upper bound of allowed numbers.
        key: the setting's name in the configuration, if it is not the field's name.
        collects_rest: True for a mapping that takes all keys of its group that have no field.
    """

    text: str
    unit: str | None = None
    least: float | None = None
    greatest: float | None = None
    below: float | None = None
    key: str | None = None
    collects_rest: bool = False


def setting(default: Any, text: str, **description: Any) -> Any:
    """Return a dataclass field with this default and `Description`; a callable default is a factory."""
    metadata = {_KEY: Description(text, **description)}
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Setting:
    """One setting of a group: its name in the configuration, its type, its default and its description."""

    field_name: str
    name: str
    type: Any
    default: Any
    description: Description

    @property
    def text(self) -> str:
        return self.description.text

    @property
    def types(self) -> tuple[Any, ...]:
        """The alternatives of a union, otherwise the type alone."""
        is_union = typing.get_origin(self.type) in (typing.Union, types.UnionType)
        return typing.get_args(self.type) if is_union else (self.type,)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values that are listed one by one: literals, true and false, null."""
        found: list[Any] = []
        for kind in self.types:
            if typing.get_origin(kind) is Literal:
                found += typing.get_args(kind)
            elif kind is bool:
                found += [True, False]
            elif kind is types.NoneType:
                found.append(None)
        return tuple(sorted(found, key=lambda value: value is None))  # null comes last


def settings_of(group: type) -> list[Setting]:
    """Return the settings of a dataclass, in the order of its fields."""
    hints = typing.get_type_hints(group)
    found = []
    for each in dataclasses.fields(group):
        if _KEY in each.metadata:
            description = each.metadata[_KEY]
            default = each.default if each.default_factory is MISSING else each.default_factory()
            found.append(Setting(each.name, description.key or each.name, hints[each.name], default, description))
    return found


def groups_of(config: type) -> dict[str, type]:
    """Return the groups of a configuration class: the fields that are dataclasses, by name."""
    hints = typing.get_type_hints(config)
    names = (each.name for each in dataclasses.fields(config))
    return {name: hints[name] for name in names if dataclasses.is_dataclass(hints[name])}


def read_group(group: type, values: Mapping[str, Any], prefix: str) -> Any:
    """Return `group` built from plain values.

    Args:
        group: a dataclass of settings.
        values: setting names and values; a setting that is absent takes its default.
        prefix: the group's name and a dot, for messages.

    Raises:
        UsageError: config.unknown for a name that the group does not have, config.missing for a required value that is
            absent, and the errors of `checked`.
    """
    settings = settings_of(group)
    rest = {name: value for name, value in values.items() if name not in {setting.name for setting in settings}}
    arguments = {}
    for each in settings:
        if each.description.collects_rest:
            arguments[each.field_name], rest = rest, {}
        elif each.name in values:
            arguments[each.field_name] = checked(each, values[each.name], prefix)
    for name in rest:
        raise unknown_setting(f"{prefix}{name}", [f"{prefix}{setting.name}" for setting in settings])
    return group(**arguments)


def unknown_setting(name: str, choices: Iterable[str]) -> UsageError:
    """Return the error for a setting that does not exist; the message suggests the nearest ones."""
    choices = sorted(choices)
    near = difflib.get_close_matches(name, choices, n=3, cutoff=0.75)
    hint = f" Did you mean {' or '.join(near)}?" if near else f" Known: {', '.join(choices)}."
    return UsageError(f"unknown setting {name!r}.{hint}", code="config.unknown", setting=name, choices=choices)


def checked(setting: Setting, value: Any, prefix: str = "") -> Any:
    """Return the value, lists as tuples.

    Raises:
        UsageError: config.missing for an unset required value, config.choice for a value that is not one of the
            listed ones, config.range for a number outside its range, config.type for any other wrong value.
    """
    name = f"{prefix}{setting.name}"
    if value == "???":
        raise UsageError(f"{name} must be set: {setting.text}", code="config.missing", setting=name)
    if any(_fits(value, kind, setting.description) for kind in setting.types):
        return tuple(value) if isinstance(value, list) else value
    choices = [in_yaml(choice) for choice in setting.choices]
    near = difflib.get_close_matches(str(value), choices, n=2, cutoff=0.6) if isinstance(value, str) else []
    hint = f" Did you mean {' or '.join(near)}?" if near else _example(setting, name)
    allowed = expected(setting)
    if isinstance(value, float) and not math.isfinite(value):
        allowed = allowed.replace("a number", "a finite number")
    raise UsageError(
        f"{name} must be {allowed}; got {repr(value) if isinstance(value, str) else in_yaml(value)}.{hint}",
        code=f"config.{_fault(setting, value)}",
        setting=name,
        value=value,
        choices=choices,
    )


def _example(setting: Setting, name: str) -> str:
    """Return a hint that shows how to write a mapping or a list on the command line; "" for other settings."""
    kinds = {typing.get_origin(kind) for kind in setting.types}
    if dict in kinds:
        return f" Add entries one by one: +{name}.NAME=VALUE."
    return f" A list is written {name}=[a,b]." if tuple in kinds else ""


def _fault(setting: Setting, value: Any) -> str:
    """Return what is wrong with a value that does not fit: "range", "choice" or "type"."""
    if any(_is_number(value, kind) for kind in setting.types):
        return "range"
    takes_others = any(kind in (int, float, str) for kind in setting.types)
    return "type" if takes_others or setting.choices in ((), (None,)) else "choice"


def _is_number(value: Any, kind: Any) -> bool:
    numbers: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float)}
    allowed = numbers.get(kind)
    return allowed is not None and isinstance(value, allowed) and not isinstance(value, bool)


def _fits(value: Any, kind: Any, description: Description) -> bool:
    if typing.get_origin(kind) is Literal:
        return not isinstance(value, bool) and value in typing.get_args(kind)
    if kind in (int, float):
        return _is_number(value, kind) and math.isfinite(value) and _in_range(value, description)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
    return isinstance(value, typing.get_origin(kind) or kind)


def _in_range(value: float, description: Description) -> bool:
    least, greatest, below = description.least, description.greatest, description.below
    within = (least is None or least <= value) and (greatest is None or value <= greatest)
    return within and (below is None or value < below)


def expected(setting: Setting) -> str:
    """Describe the allowed values, such as "an integer of at least 1 or null"."""
    kinds = {int: f"an integer{_span(setting.description)}", float: f"a number{_span(setting.description)}"}
    kinds |= {str: "a string", tuple: "a list of strings", dict: "a mapping"}
    parts = [kinds[kind] for each in setting.types if (kind := typing.get_origin(each) or each) in kinds]
    choices = [in_yaml(choice) for choice in setting.choices]
    if len(choices) > 1 and not parts:
        return f"one of {', '.join(choices)}"
    *first, last = [*parts, *choices]
    return f"{', '.join(first)} or {last}" if first else last


def _span(description: Description) -> str:
    if description.greatest is not None:
        return f" from {description.least} to {description.greatest}"
    least = "" if description.least is None else f" of at least {description.least}"
    return least if description.below is None else f"{least} and below {description.below}"


def in_yaml(value: Any) -> str:
    """Write a value as YAML and the command line do: null, true, false, and lists in brackets."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_yaml, value))}]"
    return str(value)
