"""Hydra's complaints about a command line, in one message that names the value, the choices and the mend."""

import difflib
import os
import re
import sys
from collections.abc import Callable

import hydra
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitkernels import parallel
from vitkernels.errors import UsageError, unknown_name
from vitkernels.training import sweep
from vitkernels.training.signals import EXIT_INTERRUPTED

_OF_THE_CLUSTER_EXTRA = ("submitit_local", "submitit_slurm", "optuna")


def run(main: Callable[[], None], config_dir: str) -> int:
    """Call a Hydra main function, or with -m that of a sweep's jobs; returns the exit code.

    It is 2 after a message about what is wrong in the command line, which here gets what a rank or a sweep needs.
    """
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # let errors reach us as they are
    try:
        sys.argv = parallel.rank_arguments(sweep.arguments(sys.argv))
    except UsageError as error:
        print(f"error: {error}", flush=True)
        return 2
    sweeps = bool({"-m", "--multirun"} & set(sys.argv))
    if sweeps:
        # A function that can be imported: launchers pickle what their jobs run, and cannot pickle a script's own.
        main = hydra.main(version_base="1.3", config_path=config_dir, config_name="config")(sweep.run_job)
    try:
        main()
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error, config_dir)}", flush=True)
        return 2
    except Exception as error:
        if not sweep.conclude(error):
            raise
        return 1
    except KeyboardInterrupt:
        continues = "the same command continues" if sweeps else "resume=auto goes on from the newest checkpoint, if any"
        print(f"interrupted; {continues}", flush=True)
        return EXIT_INTERRUPTED
    return 0


def explain(error: Exception, config_dir: str) -> str:
    """What is wrong, without Hydra's internals."""
    if isinstance(error, MissingConfigException) and error.options:
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        extra = " It comes with pip install 'vitkernels[cluster]'." if option in _OF_THE_CLUSTER_EXTRA else ""
        return f"{unknown_name(group, option, error.options)} Choose with {group}=NAME.{extra}"
    text = (str(error).splitlines() or [type(error).__name__])[0]
    if isinstance(error, OverrideParseException):
        name, _, value = error.override.partition("=")
        if "=" in value:  # such as the folder of a sweep's job
            return f"cannot read {error.override!r}: a value with = in it needs quotes of its own: '{name}=\"{value}\"'"
        return f"cannot read {error.override!r}: a setting is name=value, e.g. attn=sdpa or data.batch_size=64"
    override = re.match(r"Could not override '([^']+)'", text)
    if override and "not in" in f"{error} {error.__cause__}":  # "not in struct", or not in one of Hydra's own
        key = override[1]
        near = difflib.get_close_matches(key, _settings(config_dir), n=3, cutoff=0.6)
        hint = f"Did you mean {' or '.join(near)}? " if near else ""
        return f"there is no setting {key!r}. {hint}`python train.py --cfg job` prints all; +{key}=... adds a new one."
    cause = error.__cause__
    return f"{text} ({str(cause).splitlines()[0]})" if cause else text


def _settings(config_dir: str) -> list[str]:
    """The dotted names of the default configuration."""
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir, version_base="1.3"):
        return _flat(OmegaConf.to_container(compose("config"), throw_on_missing=False))


def _flat(node: dict, prefix: str = "") -> list[str]:
    names = []
    for key, child in node.items():
        names += _flat(child, f"{prefix}{key}.") if isinstance(child, dict) and child else [f"{prefix}{key}"]
    return names
