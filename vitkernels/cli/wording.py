"""Phrase errors for the command line: Hydra's in one sentence, the library's with the setting to change."""

import re
from collections.abc import Sequence

from hydra.errors import MissingConfigException, OverrideParseException

from vitkernels.cli.known_settings import OPEN, read_owners, suggestion
from vitkernels.cli.overrides import parse
from vitkernels.config.checks import NOT_IN_MODEL_KWARGS
from vitkernels.config.compose import compose
from vitkernels.config.location import PROGRAM
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.create import is_known, takes_argument
from vitkernels.sweep.job import quoted

_IN_CLUSTER_EXTRA = ("submitit_local", "submitit_slurm", "optuna")

# The setting that a library error concerns: by the error's code or, for unknown names, by their kind.
_SETTING_OF_CODE = {
    "attention.tiles": "attn.tiles",
    "attention.unsupported_model": "attn",
    "data.batch_size": "data.batch_size",
    "data.in_chans": "model.in_chans",
    "data.mixup": "data.mixup",
    "data.cache_gb": "data.cache_gb",
    "data.num_classes": "data.num_classes",
    "data.root": "data.root",
    "data.table": "data.table",
    "data.shard_fields": "data.label",
    "data.shard_label": "data.label",
    "data.small_images": "data.small_images",
    "data.splits": "data.root",
    "distill.classes": "distill.teacher",
    "distill.images": "distill.teacher",
    "models.arguments": "model.kwargs.NAME",
    "models.attention": "model.name",
    "models.download": "model.pretrained",
    "models.image_size": "model.img_size",
    "models.tag": "model.name",
    "models.weights_mismatch": "checkpoint",
    "models.weights_missing": "checkpoint",
    "models.weights_unreadable": "checkpoint",
    "optim.arguments": "optim.kwargs.NAME",
    "optim.import": "optim.opt",
    "optim.kernel": "ops.adamw",
    "parallel.cuda_graphs": "compile",
    "parallel.host_memory": "parallel.send",
    "parallel.optimizer": "optim.opt",
    "parallel.send": "parallel.send",
    "parallel.world": "parallel",
    "plan.accum_steps": "trainer.accum_steps",
    "quant.block_size": "quant.block_size",
    "quant.scheme": "quant",
    "runtime.compile_mode": "compile",
    "runtime.precision": "runtime.precision",
    "runtime.unavailable": "runtime",
}
_SETTING_OF_KIND = {
    "8-bit dtype": "quant.dtype",
    "attention backend": "attn",
    "crop_mode": "data.crop_mode",
    "decode": "data.decode",
    "interpolation": "data.interpolation",
    "mixup mode": "data.mixup.mode",
    "mixup setting": "data.mixup",
    "model": "model.name",
    "optimizer": "optim.opt",
    "optimizer kernel": "ops.adamw",
    "precision": "runtime.precision",
    "runtime": "runtime",
    "small_images": "data.small_images",
    "teacher": "distill.teacher",
}


def in_settings(error: UsageError) -> str:
    """Return the message of a library error, followed by its setting unless the message names it."""
    if model_of_timm := _model_of_timm(error):
        return model_of_timm
    message, setting = str(error), setting_of(error)
    if setting is None or f"{setting}=" in message:
        return message
    return f"{message}{'' if message.endswith(('.', '?')) else '.'} Setting: {setting}=..."


def setting_of(error: UsageError) -> str | None:
    """Return the setting that a library error concerns, or None."""
    fields = error.fields
    if error.code.startswith("config."):  # these messages already name settings
        return None
    if error.code == "unknown_name":
        kind = fields["kind"]
        of_op = f"ops.{kind.removesuffix(' backend')}" if kind.endswith(" backend") else None
        of_strategy = kind.replace(" ", ".") if kind.startswith("parallel ") else None
        return _SETTING_OF_KIND.get(kind) or of_op or of_strategy
    if error.code == "registry.unsupported":
        return "attn" if fields["op"] == "attention" else f"ops.{fields['op']}"
    if error.code == "attention.options":
        return f"attn.{fields['options'][0]}"
    if error.code in ("data.value", "parallel.setting", "parallel.value"):
        return f"{error.code.split('.')[0]}.{fields['setting']}"
    if error.code == "models.op_option":
        return f"ops.{fields['option'].replace('residual_dtype', 'residual_precision')}"
    return _SETTING_OF_CODE.get(error.code)


def explained(error: Exception, config_dir: str, words: Sequence[str] = ()) -> UsageError:
    """Return Hydra's error about the arguments `words` as one sentence: the value, the choices and the fix.

    Codes: cli.option for an unknown option of a group, cli.syntax, cli.several_values, cli.setting for an unknown
    setting, cli.hydra for the rest.
    """
    if isinstance(error, MissingConfigException) and error.options:
        return _unknown_option(error)
    if isinstance(error, OverrideParseException):
        message = f"cannot read {error.override!r}: {_how_to_write(error.override)}"
        return UsageError(message, code="cli.syntax", word=error.override)
    text = (str(error).splitlines() or [type(error).__name__])[0]
    several = re.match(r"(Ambiguous value for argument|Sweep parameters) '(.+)'", text)
    if several:
        name, _, value = several[2].partition("=")
        hint = f"; a literal comma needs quotes: '{name}=\"{value}\"'" if several[1].startswith("Ambiguous") else ""
        message = f"{several[2]!r} has several values: `{PROGRAM} -m ...` runs a sweep over them{hint}"
        return UsageError(message, code="cli.several_values", setting=name, value=value)
    override = re.match(r"Could not override '([^']+)'", text)
    if override and "not in" in f"{error} {error.__cause__}":  # "not in struct", or not in one of Hydra's own
        return _model_argument(override[1], words) or no_setting(override[1], read_owners(config_dir))
    appended = re.match(r"Could not append to config. An item is already at '(.+)'", text)
    if appended:
        message = f"the setting {appended[1]!r} exists already: write {appended[1]}=... without +"
        return UsageError(message, code="cli.setting", setting=appended[1])
    cause = error.__cause__
    return UsageError(f"{text} ({str(cause).splitlines()[0]})" if cause else text, code="cli.hydra")


def _unknown_option(error: MissingConfigException) -> UsageError:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    unknown = unknown_name(group, option, error.options or ())
    fields = {**unknown.fields, "group": group}
    if model_of_timm := _model_of_timm(unknown):
        return UsageError(model_of_timm, code="cli.option", **fields)
    extra = " It comes with pip install 'vitkernels[cluster]'." if option in _IN_CLUSTER_EXTRA else ""
    return UsageError(f"{unknown} Choose with {group}=NAME.{extra}", code="cli.option", **fields)


def _model_of_timm(error: UsageError) -> str | None:
    """Return the message for an unknown model=NAME if timm knows the name, else None.

    model=NAME chooses a file of conf/model, which has few of timm's models. Similar names of files would mislead.
    """
    fields = error.fields
    if error.code != "unknown_name" or fields["kind"] != "model" or not is_known(fields["name"]):
        return None
    name, files = fields["name"], ", ".join(fields["choices"])
    return f"unknown model {name!r}; known: {files}. timm has it: choose it with model=timm model.name={name}"


def _how_to_write(word: str) -> str:
    """Return the fix for a name=value that Hydra cannot read."""
    name, equals, value = word.partition("=")
    if re.match(r"[\[{\"']|\w+\(", value):
        return "close its bracket, brace, parenthesis or quotation"
    if equals and parse(f"{name}={quoted(value)}"):
        return f"a value with =, commas or blanks needs quotes: '{name}=\"{value}\"'"
    return "a setting is name=value, e.g. attn=sdpa or data.batch_size=64"


def _model_argument(key: str, words: Sequence[str]) -> UsageError | None:
    """Return the error for an unknown setting model.NAME if NAME is an argument of the model in timm, else None."""
    group, _, name = key.partition(".")
    given = next((word for word in words if word.startswith(f"{key}=")), "")
    override = parse(given)
    if group != "model" or override is None:
        return None
    if name in NOT_IN_MODEL_KWARGS:
        hint = NOT_IN_MODEL_KWARGS[name]
    else:
        try:
            model = compose([word for word in words if word.startswith(("model=", "model.name=", "experiment="))]).model
        except UsageError:
            return None
        if not takes_argument(model.name, name, override.value()):
            return None
        hint = f"the model {model.name} takes it as an argument: +model.kwargs.{given.removeprefix('model.')}"
    return UsageError(f"no setting {key!r}: {hint}", code="cli.setting", setting=key, owners=[])


def no_setting(key: str, owners: dict[str, list[str]]) -> UsageError:
    """Return the error for a setting that does not exist, or not with the chosen options."""
    if f"{key}." in OPEN:
        message = f"{key} has no such entry yet: + adds one, as in +{key}.NAME=VALUE"
        return UsageError(message, code="cli.setting", setting=key, owners=owners.get(key, []))
    plus = f"+{key}=... adds it." if key.startswith(OPEN) else ""
    if owners.get(key):
        message = f"no setting {key!r} here: it belongs to {' or '.join(owners[key])}. {plus}".strip()
    else:
        hint = plus or f"{suggestion(key, owners)}`{PROGRAM} --help` lists all settings."
        message = f"no setting {key!r}. {hint}"
    return UsageError(message, code="cli.setting", setting=key, owners=owners.get(key, []))
