"""The typed configuration of a run: read once from Hydra, validated, and passed on as frozen dataclasses."""

from vitkernels.config.groups import COMPILE_MODES
from vitkernels.config.saved import from_run
from vitkernels.config.schema import Config, check_precision

__all__ = ["COMPILE_MODES", "Config", "check_precision", "from_run"]
