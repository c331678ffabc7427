"""The text of `--help`: groups and settings, from the dataclasses that read them."""

import textwrap

from vitkernels.config.location import PROGRAM
from vitkernels.config.schema import Config
from vitkernels.config.setting import Setting, groups_of, in_yaml, settings_of

_WIDTH = 110
# Groups that are folders of options in conf/, in the order of the help; the others are in config.yaml.
_WITH_OPTIONS = (
    "attn",
    "ops",
    "quant",
    "model",
    "data",
    "optim",
    "schedule",
    "runtime",
    "parallel",
    "logger",
    "evaluation",
)

_EXAMPLES = """
  # handwritten digits, on any machine
  {program}
  {program} model.name=vit_base_patch16_224 data=imagefolder data.root=/data/imagenet
  # a sweep with one verdict table
  {program} -m attn=native,sdpa data=fake trainer.max_steps=40
  # evaluate a run, or a checkpoint in it
  {program} mode=eval checkpoint=RUN
  # continue after an interruption; continue a run in a new folder
  {program} ... resume=auto
  {program} resume=RUN trainer.max_steps=2000
  # four GPUs: a step has 4 × data.batch_size images
  {torchrun} ...
"""


def help_text() -> str:
    """Return the groups and settings with their types, defaults and units, as `--help` prints them."""
    torchrun = "torchrun --nproc-per-node=4 " + ("train.py" if PROGRAM.startswith("python") else "-m vitkernels train")
    lines = ["Examples:", _EXAMPLES.format(program=PROGRAM, torchrun=torchrun)]
    lines += ["Groups (GROUP=OPTION; an option is a file in conf/GROUP/):", ""]
    groups = groups_of(Config)
    lines += [_row(name, groups[name].__doc__ or "", 14) for name in _WITH_OPTIONS]
    lines += [_row("experiment", "Complete recipes; each file begins with its command and expected result.", 14)]
    lines += ["", "Settings (NAME=VALUE) and their defaults:", ""]
    for prefix, group in (("", Config), *((f"{name}.", group) for name, group in groups.items())):
        for each in settings_of(group):
            lines.append(_row(*_name_and_text(prefix, each), 44))
        lines.append("")
    lines.append("Settings of an option, such as those of data=imagefolder:")
    lines.append(f"  {PROGRAM} data=imagefolder --cfg job --package data")
    return "\n".join(lines)


def _name_and_text(prefix: str, setting: Setting) -> tuple[str, str]:
    unit = f" [{setting.description.unit}]" if setting.description.unit else ""
    choices = [in_yaml(choice) for choice in setting.choices if isinstance(choice, str | int)]
    listed = f" One of {', '.join(choices)}." if len(choices) > 2 and len(setting.choices) == len(choices) else ""
    if setting.description.collects_rest:
        return f"{prefix}*", setting.text
    default = "{}" if setting.default == {} else in_yaml(setting.default)
    return f"{prefix}{setting.name}={default}", f"{setting.text}{unit}{listed}"


def _row(name: str, text: str, column: int) -> str:
    """Return name and text in two columns; a long name has a line of its own."""
    first = f"  {name}".ljust(column)
    wrapped = textwrap.wrap(text, _WIDTH - column)
    if len(first) == len(name) + 2:  # no blank between them
        return "\n".join([first, *(" " * column + line for line in wrapped)])
    return ("\n" + " " * column).join([first + wrapped[0], *wrapped[1:]])
