"""Read settings from an earlier run, so that its path is enough to evaluate or resume it."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, ListConfig, OmegaConf

from vitkernels.config.schema import Config
from vitkernels.config.setting import groups_of
from vitkernels.errors import UsageError
from vitkernels.files import read_json

log = logging.getLogger(__name__)

_FOR_EVALUATION = ("model", "data")
_NEVER = ("mode", "resume")


def read_settings(folder: Path) -> dict:
    """Return the settings that identify the run in the folder, {} if there is none.

    Settings that older versions did not have get the value that these versions used.
    """
    settings = read_json(folder / "config.json") or {}
    target = settings.get("data", {}).get("_target_", "")
    if target.startswith("data."):  # the data sets were not part of the package
        settings["data"]["_target_"] = f"vitkernels.{target}"
    if "schedule" in settings:
        settings["schedule"].setdefault("warmup_cap", 0.1)
    if "trainer" in settings:
        settings["trainer"] = {"loss": "auto", "bce_threshold": None} | settings["trainer"]
    if "crop_pct" in settings.get("data", {}):
        settings["data"].setdefault("crop_mode", "center")
    return settings


def find_run(path: str | Path) -> Path | None:
    """Return the folder of the run that is, or contains, this path; None if it belongs to no run.

    Args:
        path: a run folder, its checkpoints/, one of the checkpoints in it, or its model.safetensors.
    """
    for place in (Path(path), Path(path).resolve()):
        for folder in (place, *place.parents[:2]):
            settings = read_json(folder / "config.json")
            # Other programs have a config.json next to weights, too.
            if isinstance(settings, dict) and "_target_" in (settings.get("data") or {}) and "model" in settings:
                return folder
    return None


def find_weights(path: str) -> str:
    """Return the path of the weights to read: for a run folder its best ones, else its last.

    Any other path is returned unchanged. Raises UsageError (config.no_weights) for a run without either.
    """
    folder = Path(path)
    run = folder.parent if folder.name == "checkpoints" else folder
    if not folder.is_dir() or not ((run / "config.json").is_file() or (run / "checkpoints").is_dir()):
        return path
    for name in ("best_ema.safetensors", "best.safetensors", "checkpoints/best", "model.safetensors"):
        if (run / name).exists():  # older versions kept the best weights as a checkpoint alone
            return str(run / name)
    newest = max((run / "checkpoints").glob("step_*"), default=None)
    hint = "; it has no checkpoint yet" if newest is None else f"; its newest checkpoint is {newest}"
    raise UsageError(
        f"checkpoint={path}: the run has neither best.safetensors nor model.safetensors{hint}",
        code="config.no_weights",
        setting="checkpoint",
        value=path,
    )


def from_run(cfg: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the configuration completed by the run that `resume` or, with mode=eval, `checkpoint` refers to.

    An evaluation uses the run's model and data; a resumed run uses all its settings. What the command line sets takes
    precedence; an experiment on the command line sets everything. The log says what came from the run.

    Args:
        cfg: the composed configuration; returned unchanged if it refers to no run.
        overrides: the command line's, as `HydraConfig.get().overrides.task` has them.

    Raises:
        UsageError: config.no_weights, see `find_weights`.
    """
    if isinstance(cfg.get("checkpoint"), str):
        weights = find_weights(cfg.checkpoint)
        if weights != cfg.checkpoint:
            log.info("checkpoint: %s", weights)
            cfg = cast(DictConfig, OmegaConf.merge(cfg, {"checkpoint": weights}))
    is_eval = cfg.mode == "eval"
    path = cfg.checkpoint if is_eval else None if cfg.resume == "auto" else cfg.resume
    run = find_run(path) if isinstance(path, str) else None
    given = _given_by(overrides)
    if run is None or "experiment" in given:
        return cfg
    saved = read_settings(run)
    taken = {name: saved[name] for name in saved if name in _FOR_EVALUATION or not (is_eval or name in _NEVER)}
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    merged = plain | taken
    kept = [key for key in given if key.split(".")[0] in taken]
    for key in kept:
        _copy(key.split("."), plain, merged)
    _keep_constant_rate(saved, merged, kept)
    names = ", ".join(name for name in taken if name not in kept) if is_eval else "all but parallel, checkpoints, sweep"
    log.info("settings from %s: %s%s", run, names, f"; from the command line: {', '.join(kept)}" if kept else "")
    return OmegaConf.create(merged)


def _given_by(overrides: Sequence[str]) -> list[str]:
    """Return the dotted names that the command line sets; a group's name stands for all of its settings."""
    groups = groups_of(Config)
    words: Any = OmegaConf.to_container(overrides) if isinstance(overrides, ListConfig) else overrides  # unresolved
    parsed = OverridesParser.create().parse_overrides(list(words))
    keys = [override.key_or_group for override in parsed if not override.key_or_group.startswith("hydra")]
    # A key inside a group that is also given is redundant.
    return [key for key in keys if "." not in key or not (key.split(".")[0] in groups and key.split(".")[0] in keys)]


def _copy(names: list[str], source: Mapping[str, Any], target: dict[str, Any]) -> None:
    """Set the nested value in `target` to that in `source`; remove it if `source` does not have it."""
    *groups, last = names
    for name in groups:
        source = source.get(name) or {}
        target[name] = dict(target.get(name) or {})  # a copy, because others hold this mapping
        target = target[name]
    if last in source:
        target[last] = source[last]
    else:
        target.pop(last, None)


def _keep_constant_rate(saved: Mapping[str, Any], merged: dict[str, Any], given: Sequence[str]) -> None:
    """Keep a new learning rate constant if the run's was: schedule=constant sets min_lr to optim.lr."""
    before, schedule = saved.get("optim", {}).get("lr"), saved.get("schedule", {})
    is_given = any(key in ("schedule", "schedule.min_lr") for key in given)
    if not is_given and before is not None and schedule.get("min_lr") == before:
        merged["schedule"] = {**merged["schedule"], "min_lr": merged["optim"]["lr"]}
