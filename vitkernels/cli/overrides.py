"""Prepare the arguments of a command line: quote values, order options, and refuse settings that nothing reads."""

import os
import re
from pathlib import Path
from typing import NoReturn

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from vitkernels.cli.known_settings import OPEN, flat_names, read_owners, suggestion
from vitkernels.config.location import PROGRAM
from vitkernels.errors import UsageError
from vitkernels.sweep.job import quoted

_WITH_VALUE = re.compile(r"--(config-(path|name|dir)|package|cfg|info|experimental-rerun)|-(cp|cn|cd|c|p|i)")
_CHECKED_LATER = (*OPEN, "data.", "hydra.", "hydra/")  # by Hydra, the backend or the data set's function
_OPEN_GROUPS = ("attn.", "data.", "quant.", "model.kwargs.", "optim.kwargs.")  # their names depend on the option
_USES_OF_PLUS = (
    "+ adds arguments of timm (+model.kwargs.NAME=..., +optim.kwargs.NAME=...), options of an attention backend "
    "(+attn.NAME=...), +data.mixup.NAME=... and arguments of your own data set (+data.NAME=...)"
)


def prepare(words: list[str], config_dir: str) -> list[str]:
    """Return the arguments as Hydra reads them: values quoted, options last, ++ before settings of an earlier run.

    Raises UsageError for an option or a setting that nothing reads, a value without a name, and an empty folder, which
    Hydra takes for the current one.
    """
    for word in words:
        if word.startswith("="):
            raise UsageError(f"cannot read {word!r}: no name before =, as in seed=3", code="cli.syntax", word=word)
        if word in ("hydra.run.dir=", "hydra.sweep.dir="):
            message = f"{word} is empty; write {word}. for the current folder"
            raise UsageError(message, code="cli.no_folder", setting=word[:-1])
    words = options_last([quote_value(word) for word in words])
    check_options(words, config_dir)
    check_groups(words, config_dir)
    check_added(words, config_dir)
    return allow_settings_of_a_run(words)


def parse(word: str) -> Override | None:
    """Return the override that Hydra parses from the argument; None if it cannot."""
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def quote_value(word: str) -> str:
    """Return name=value with quotes around a value that Hydra cannot read unquoted, such as a path with spaces or =.

    A leading ~/ becomes the home folder. Values that begin like a list, a mapping, a quotation or a function stay as
    they are, and so do values with commas: these may be a sweep.
    """
    name, equals, value = word.partition("=")
    has_meaning = "," in value or re.match(r"[\[{\"']|\w+ *\(", value)
    if not equals or word.startswith("-") or has_meaning or parse(word):
        return word
    # Most shells do not expand this ~, and in quotes Hydra would take it literally.
    with_quotes = f"{name}={quoted(os.path.expanduser(value) if value.startswith('~/') else value)}"
    return with_quotes if parse(with_quotes) else word


def options_last(words: list[str]) -> list[str]:
    """Return the settings, then the options with their values: Hydra rejects settings on both sides of an option."""
    settings: list[str] = []
    options: list[str] = []
    for word in words:
        is_value = bool(options) and bool(_WITH_VALUE.fullmatch(options[-1])) and "=" not in word
        (options if is_value or word.startswith("-") else settings).append(word)
    return [*settings, *options]


def check_options(words: list[str], config_dir: str) -> None:
    """Raise UsageError "cli.options" for options that Hydra does not accept; it would print its entire usage."""

    def refuse(message: str) -> NoReturn:
        raise UsageError(f"{message}; `{PROGRAM} --hydra-help` lists the options", code="cli.options", reason=message)

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign]
    _, unknown = parser.parse_known_args(words)
    if not unknown:
        return
    name = unknown[0].lstrip("-").partition("=")[0].replace("-", "_")
    owners = read_owners(config_dir)
    hint = "" if name in owners else suggestion(name, owners)
    example = f"{name if name in owners else 'NAME'}=VALUE"
    message = f"no option {unknown[0]}. {hint}A setting has no dashes: {example}; `{PROGRAM} --help` lists all settings"
    raise UsageError(message, code="cli.options", reason=f"no option {unknown[0]}")


def check_groups(words: list[str], config_dir: str) -> None:
    """Raise UsageError "cli.option" for a group that is set to a number or a mapping, as in model=3."""
    for word in words:
        override = None if word.startswith("-") else parse(word)
        if override is None or not isinstance(value := override.value(), int | float | dict):
            continue
        group = override.key_or_group
        options = sorted(path.stem for path in (Path(config_dir) / group).glob("*.yaml"))
        if options:
            message = f"{word}: {group} is a group with the options {', '.join(options)}; choose one with {group}=NAME"
            raise UsageError(message, code="cli.option", group=group, name=value, choices=options)


def check_added(words: list[str], config_dir: str) -> None:
    """Raise UsageError for a setting that + or ++ adds and that nothing reads: cli.added, cli.exists or cli.group."""
    # A user's configuration folder may define other names.
    foreign = any(word.startswith(("--config-", "-cp", "-cn", "-cd", "hydra.searchpath=")) for word in words)
    added = [override for word in words if word.startswith("+") and (override := parse(word))]
    if foreign or not added:
        return
    owners = read_owners(config_dir)
    for override in added:
        key, plus = override.key_or_group, "+" if override.is_add() else "++"
        if (Path(config_dir) / key).is_dir():
            message = f"{plus}{key}=...: {key} is a group and always set; choose its option with {key}=NAME, without +"
            raise UsageError(message, code="cli.group", setting=key)
        for name in flat_names({key: override.value()}):
            if name.startswith(_CHECKED_LATER) or (plus == "++" and name in owners):
                continue
            if name in owners:
                message = f"+{name}=... adds a setting, but {name} already exists: write {name}=..., without +"
                raise UsageError(message, code="cli.exists", setting=name)
            message = f"{plus}{name}=...: there is no setting {name!r}. {suggestion(name, owners)}{_USES_OF_PLUS}"
            raise UsageError(message, code="cli.added", setting=name)


def allow_settings_of_a_run(words: list[str]) -> list[str]:
    """Return the arguments with ++ before settings that an earlier run may have and the defaults do not.

    With resume=PATH or mode=eval, options such as the data set come from the run (vitkernels.config.from_run) after
    Hydra has composed the defaults: data.root=... must not fail because the default data set has no root. Wrong names
    are refused when the configuration is read.
    """
    resumes = any(word.startswith("resume=") and word not in ("resume=auto", "resume=null") for word in words)
    if not resumes and "mode=eval" not in words:
        return words
    chosen = {word.split("=")[0] for word in words}
    return [
        f"++{word}" if word.startswith(_OPEN_GROUPS) and "=" in word and word.split(".")[0] not in chosen else word
        for word in words
    ]
