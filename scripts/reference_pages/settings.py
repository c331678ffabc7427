"""The page of all settings."""

import re
from collections.abc import Iterable

from reference_pages.markdown import ROOT, escaped, first_paragraph, table
from vitkernels.config import Config
from vitkernels.config.setting import Setting, expected, groups_of, in_yaml, settings_of


def configuration_page() -> str:
    """Return the page of all settings: type, default, unit and one sentence each."""
    parts = [
        "# Configuration",
        "Every setting of `python train.py`, from the typed configuration in `vitkernels.config`. A setting is written "
        "`name=value`, one in a group `group.name=value`, and an option of a group `group=option`. "
        "`python train.py --cfg job` prints the values in force.",
        "## Top level",
        _settings_table(settings_of(Config)),
    ]
    for name, group in groups_of(Config).items():
        parts += [f"## {name}", first_paragraph(group.__doc__), _settings_table(settings_of(group), f"{name}.")]
        options = _options(name)
        if options:
            parts.append(f"Options of the group, `{name}=...`:")
            parts.append(table(("option", "sets"), [(f"`{name}={o}`", text) for o, text in options]))
        if name == "data":
            parts += [_data_set(option) for option, _ in options]
    parts += ["## experiment", "Complete recipes; an experiment sets values of the other groups."]
    parts.append(table(("option", "is"), [(f"`experiment={o}`", text) for o, text in _options("experiment")]))
    return "\n\n".join(parts) + "\n"


def _settings_table(settings: Iterable[Setting], prefix: str = "") -> str:
    rows = []
    for each in settings:
        if each.description.collects_rest:
            rows.append((f"`{prefix}...`", "any", "–", each.text))
            continue
        default = "required" if each.default == "???" else f"`{in_yaml(each.default)}`"
        kind = expected(each) + (f", {each.description.unit}" if each.description.unit else "")
        rows.append((f"`{prefix}{each.name}`", kind, default, each.text))
    return table(("setting", "value", "default", "meaning"), rows)


def _options(group: str) -> list[tuple[str, str]]:
    """Return (option, first sentence of its file's comment) for each file of a group in conf/."""
    found = []
    for path in sorted((ROOT / "conf" / group).glob("*.yaml")):
        comment = []
        for line in path.read_text().splitlines():
            if not line.startswith("# "):
                if comment:
                    break
                continue
            comment.append(line.removeprefix("# "))
        text = " ".join(line for line in comment if not line.startswith("@package"))
        found.append((path.stem, escaped(re.split(r"(?<=[a-z\d)\]])[.:] (?=[A-Z])|: (?=model=)", text)[0].rstrip("."))))
    return found


def _data_set(option: str) -> str:
    return f"### data={option}\n\n```{{literalinclude}} ../../../conf/data/{option}.yaml\n:language: yaml\n```"
