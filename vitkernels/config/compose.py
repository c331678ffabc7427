"""Compose the configuration of a command line without running it."""

from collections.abc import Sequence

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException, MissingConfigException
from omegaconf.errors import OmegaConfBaseException

from vitkernels.config.location import conf_dir
from vitkernels.config.schema import Config
from vitkernels.errors import UsageError, unknown_name


def compose(overrides: Sequence[str]) -> Config:
    """Return the configuration that `python train.py *overrides` would run with.

    Raises UsageError as `Config.from_hydra` does, and for a group, option or setting that does not exist.
    """
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            cfg = hydra_compose("config", overrides=list(overrides))
    except MissingConfigException as error:
        if not error.options:
            raise UsageError(str(error).splitlines()[0], code="config.compose") from error
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        raise unknown_name(group, option, error.options) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(str(error).splitlines()[0], code="config.compose") from error
    return Config.from_hydra(cfg)
