"""The typed configuration of a run: read from Hydra's once, validated, and frozen."""

import copy
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from vitkernels.config import checks
from vitkernels.config.groups import (
    AttentionSettings,
    CheckpointSettings,
    Compile,
    DataSettings,
    DistillSettings,
    EmaSettings,
    EvaluationSettings,
    LoggerSettings,
    ModelSettings,
    OpsSettings,
    OptimSettings,
    ParallelSettings,
    QuantSettings,
    RuntimeSettings,
    ScheduleSettings,
    SweepSettings,
    TrainerSettings,
)
from vitkernels.config.setting import checked, groups_of, in_yaml, read_group, setting, settings_of, unknown_setting
from vitkernels.errors import UsageError


@dataclass(frozen=True)
class Config:
    """All settings of a run. `Config()` has the defaults of conf/config.yaml."""

    mode: Literal["train", "eval"] = setting("train", "Train a model, or evaluate the weights of checkpoint.")
    # NumPy takes seeds of 32 bits, and ranks are added to this one.
    seed: int = setting(0, "Random seed for weights, data order and augmentation.", least=0, greatest=2**31)
    checkpoint: str | None = setting(
        None, "Weights to start from or to evaluate: a run, a checkpoint, .safetensors or a timm state dict."
    )
    resume: str | None = setting(
        None, "auto continues this run from its newest complete checkpoint; PATH continues that run or checkpoint."
    )
    compile: Compile = setting(
        "auto",
        "torch.compile: true, false, a mode such as reduce-overhead, or auto (on for cuda, with CUDA graphs where they "
        "work).",
    )
    speed: Literal["auto", "max"] = setting(
        "auto",
        "auto computes what timm computes; max also rounds the residual stream to bf16 and keeps MLP activations in "
        "memory.",
    )
    trainer: TrainerSettings = field(default_factory=TrainerSettings)
    ema: EmaSettings = field(default_factory=EmaSettings)
    distill: DistillSettings = field(default_factory=DistillSettings)
    checkpoints: CheckpointSettings = field(default_factory=CheckpointSettings)
    sweep: SweepSettings = field(default_factory=SweepSettings)
    attn: AttentionSettings = field(default_factory=AttentionSettings)
    ops: OpsSettings = field(default_factory=OpsSettings)
    quant: QuantSettings = field(default_factory=QuantSettings)
    model: ModelSettings = field(default_factory=ModelSettings)
    data: DataSettings = field(default_factory=DataSettings)
    optim: OptimSettings = field(default_factory=OptimSettings)
    schedule: ScheduleSettings = field(default_factory=ScheduleSettings)
    runtime: RuntimeSettings = field(default_factory=RuntimeSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    logger: LoggerSettings = field(default_factory=LoggerSettings)
    evaluation: EvaluationSettings = field(default_factory=EvaluationSettings)
    # The plain values this was read from: run folders hold exactly these keys.
    _source: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @classmethod
    def from_hydra(cls, cfg: DictConfig) -> "Config":
        """Return the validated configuration that Hydra composed.

        Raises:
            UsageError: config.interpolation for a value that refers to something missing, and the errors of
                `from_dict`.
        """
        try:
            plain: Any = OmegaConf.to_container(cfg, resolve=True)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0]
            raise UsageError(
                f"cannot resolve {error.full_key}: {reason}", code="config.interpolation", setting=error.full_key
            ) from error
        return cls.from_dict(plain)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Config":
        """Return the validated configuration of plain nested values; absent settings take their defaults.

        Raises:
            UsageError: config.unknown, config.missing, config.type, config.range or config.choice for one wrong
                setting; config.conflict for settings that contradict each other; config.target for a data set's
                function that cannot be imported. `setting` names it; `value` and `choices` are given where they apply.
        """
        plain = copy.deepcopy(dict(plain))
        groups = groups_of(cls)
        arguments = {each.name: checked(each, plain[each.name]) for each in settings_of(cls) if each.name in plain}
        _refuse_misspelled(plain, [*groups, *(each.name for each in settings_of(cls))])
        for name, group in groups.items():
            values = plain.get(name, {})
            if not isinstance(values, Mapping):
                first = settings_of(group)[0]
                raise UsageError(
                    f"{name} must be a mapping; got {values!r}. Set its settings one by one, such as "
                    f"{name}.{first.name}={in_yaml(first.default)}",
                    code="config.type",
                    setting=name,
                    value=values,
                )
            arguments[name] = read_group(group, values, f"{name}.")
        config = cls(**arguments)
        object.__setattr__(config, "_source", plain)
        check(config)
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return the plain nested values: those it was read from, or all settings of one made in Python."""
        if self._source is not None:
            return copy.deepcopy(self._source)
        own = {each.name: getattr(self, each.field_name) for each in settings_of(Config)}
        return own | {name: _plain(getattr(self, name)) for name in groups_of(Config)}


def check(config: Config) -> None:
    """Raise UsageError if settings contradict each other."""
    checks.check_mode(config.mode, config.checkpoint, config.quant)
    checks.check_evaluation(config.mode, config.checkpoint, config.evaluation, config.model, config.quant)
    checks.check_training(config.trainer, config.ema)
    checks.check_schedule(config.schedule, config.optim.lr)
    checks.check_model(config.model)
    checks.check_data(config.data)


def check_precision(config: Config, precision: str) -> None:
    """Raise UsageError if settings contradict the runtime's precision (fp32, bf16 or fp16)."""
    checks.check_residual_precision(config.ops, precision)


def _refuse_misspelled(plain: Mapping[str, Any], known: list[str]) -> None:
    """Raise UsageError for a top-level name that is nearly a known one; others may be variables of a user's YAML."""
    for name in plain.keys() - set(known):
        if difflib.get_close_matches(str(name), known, cutoff=0.75):
            raise unknown_setting(str(name), known)


def _plain(group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for each in settings_of(type(group)):
        value = copy.deepcopy(getattr(group, each.field_name))
        if each.description.collects_rest:
            found |= value
        elif not isinstance(group, QuantSettings) or each.name == "name" or value != each.default:
            found[each.name] = list(value) if isinstance(value, tuple) else value
    return found
