"""Hydra's complaints about a command line, in one message that names the value, the choices and the mend."""

import difflib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitkernels import parallel
from vitkernels.errors import UsageError, unknown_name
from vitkernels.sweep import job
from vitkernels.training.signals import EXIT_INTERRUPTED

_OF_THE_CLUSTER_EXTRA = ("submitit_local", "submitit_slurm", "optuna")

# Settings below these go on, whole, to something that knows its own names and refuses others itself.
_OPEN = ("model.kwargs.", "optim.kwargs.", "data.mixup.")
_CHECKED_LATER = (*_OPEN, "attn.", "data.", "hydra.", "hydra/")
_TAKES_PLUS = (
    "+ is for timm's arguments, +model.kwargs.NAME=... and +optim.kwargs.NAME=..., for an attention backend's options, "
    "+attn.NAME=..., for +data.mixup.NAME=... and for what an own data set takes, +data.NAME=..."
)


def run(main: Callable[[], None], config_dir: str) -> int:
    """Call a Hydra main function, or with -m that of a sweep's jobs; returns the exit code.

    It is 2 after a message about what is wrong in the command line, which here gets what a rank or a sweep needs.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach us as they are
    try:
        words = [readable(word) for word in sys.argv[1:]]
        check_added(words, config_dir)
        sys.argv = parallel.rank_arguments(job.add_sweep_folder([sys.argv[0], *words]))
    except UsageError as error:
        print(f"error: {error}", flush=True)
        return 2
    sweeps = bool({"-m", "--multirun"} & set(sys.argv))
    if sweeps:
        # A function that can be imported: launchers pickle what their jobs run, and cannot pickle a script's own.
        main = hydra.main(version_base="1.3", config_path=config_dir, config_name="config")(job.run_job)
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error, config_dir)}", flush=True)
        return 2
    except Exception as error:
        if job.write_pending_verdict(error):
            return 1
        if not isinstance(error, OSError):
            raise
        setting = "hydra.sweep.dir" if sweeps else "hydra.run.dir"  # Hydra's: what a run does ends in its own messages
        print(f"error: the folder of the results cannot be written: {error}; {setting}=FOLDER is another", flush=True)
        return 2
    except KeyboardInterrupt:
        continues = "the same command continues" if sweeps else "resume=auto goes on from the newest checkpoint, if any"
        print(f"interrupted; {continues}", flush=True)
        return EXIT_INTERRUPTED
    return 0


def readable(word: str) -> str:
    """name=value, with the value in quotes where Hydra can read it only so: a path with blanks, or =; ~/ is the home.

    What begins like a list, a mapping, a quotation or a function is left alone, and so is what has a sweep's commas.
    """
    name, equals, value = word.partition("=")
    has_meaning = "," in value or re.match(r"[\[{\"']|\w+ *\(", value)
    if not equals or word.startswith("-") or has_meaning or _parsed(word):
        return word
    # Most shells leave this ~ alone; in quotes it would be a folder of that name.
    quoted = f"{name}={job.quoted(os.path.expanduser(value) if value.startswith('~/') else value)}"
    return quoted if _parsed(quoted) else word


def _parsed(word: str) -> Override | None:
    try:
        return OverridesParser.create().parse_override(word)
    except HydraException:
        return None


def check_added(words: list[str], config_dir: str) -> None:
    """Raises UsageError for a setting that + or ++ adds and that nothing reads."""
    # Other folders' configurations have names of their own.
    foreign = any(word.startswith(("--config-", "-cp", "-cn", "-cd", "hydra.searchpath=")) for word in words)
    added = [override for word in words if word.startswith("+") and (override := _parsed(word))]
    if foreign or not added:
        return
    owners = _owners(config_dir)
    for override in added:
        key, plus = override.key_or_group, "+" if override.is_add() else "++"
        if (Path(config_dir) / key).is_dir():
            raise UsageError(
                f"{plus}{key}=...: {key} is a group that has its default; choose with {key}=NAME, without +"
            )
        for name in _flat({key: override.value()}):
            if name.startswith(_CHECKED_LATER) or (plus == "++" and name in owners):
                continue
            if name in owners:
                raise UsageError(f"+{name}=... adds a setting, and {name} is one already: {name}=..., without +")
            raise UsageError(f"{plus}{name}=...: nothing reads a setting {name!r}. {_near(name, owners)}{_TAKES_PLUS}")


def explain(error: Exception, config_dir: str) -> str:
    """What is wrong, without Hydra's internals."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        extra = " It comes with pip install 'vitkernels[cluster]'." if option in _OF_THE_CLUSTER_EXTRA else ""
        return f"{unknown_name(group, option, error.options)} Choose with {group}=NAME.{extra}"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, OverrideParseException):
        return f"cannot read {error.override!r}: {_how_to_write(error.override)}"
    several = re.match(r"(Ambiguous value for argument|Sweep parameters) '(.+)'", text)
    if several:
        name, _, value = several[2].partition("=")
        quotes = f"; a comma that is meant needs quotes of its own: '{name}=\"{value}\"'"
        hint = quotes if several[1].startswith("Ambiguous") else ""
        return f"{several[2]!r} has several values: python train.py -m ... makes a sweep of them{hint}"
    override = re.match(r"Could not override '([^']+)'", text)
    if override and "not in" in f"{error} {error.__cause__}":  # "not in struct", or not in one of Hydra's own
        return _no_setting(override[1], _owners(config_dir))
    cause = error.__cause__
    return f"{text} ({str(cause).splitlines()[0]})" if cause else text


def _how_to_write(word: str) -> str:
    """The mend for a name=value that Hydra cannot read."""
    name, equals, value = word.partition("=")
    if re.match(r"[\[{\"']|\w+\(", value):
        return "a list needs its ], a mapping its }, a function its ) and a quotation its second mark"
    if equals and _parsed(f"{name}={job.quoted(value)}"):
        return f"a value with =, commas or blanks in it needs quotes of its own: '{name}=\"{value}\"'"
    return "a setting is name=value, e.g. attn=sdpa or data.batch_size=64"


def _no_setting(key: str, owners: dict[str, list[str]]) -> str:
    plus = f"+{key}=... adds it." if key.startswith(_OPEN) else ""
    if owners.get(key):
        return f"there is no setting {key!r} here: it belongs to {' or '.join(owners[key])}. {plus}".strip()
    hint = plus or f"{_near(key, owners)}`python train.py --cfg job` prints all."
    return f"there is no setting {key!r}. {hint}"


def _near(name: str, owners: dict[str, list[str]]) -> str:
    near = difflib.get_close_matches(name, owners, n=3, cutoff=0.75)
    return f"Did you mean {' or '.join(near)}? " if near else ""


def _owners(config_dir: str) -> dict[str, list[str]]:
    """Each setting's dotted name, and the group=option that have it; none for those of config.yaml itself."""
    owners = {name: [] for name in _flat(_content(Path(config_dir) / "config.yaml"))}
    for path in sorted(Path(config_dir).glob("*/*.yaml")):
        group = path.parent.name
        if group != "experiment":  # which sets what the other groups have
            for name in _flat({group: _content(path)}):
                owners.setdefault(name, []).append(f"{group}={path.stem}")
    return owners


def _content(path: Path) -> dict:
    content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    content.pop("defaults", None)
    return content


def _flat(node: dict, prefix: str = "") -> list[str]:
    names = []
    for key, child in node.items():
        names += _flat(child, f"{prefix}{key}.") if isinstance(child, dict) and child else [f"{prefix}{key}"]
    return names
