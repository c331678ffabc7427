"""Refuse settings that contradict each other, before any work is done."""

import difflib
import inspect
import pkgutil

from vitkernels import torchrun_environment
from vitkernels.config.groups import (
    DataSettings,
    EmaSettings,
    EvaluationSettings,
    ModelSettings,
    OpsSettings,
    QuantSettings,
    ScheduleSettings,
    TrainerSettings,
)
from vitkernels.errors import UsageError

# Arguments that the trainer passes to timm, and why model.kwargs cannot.
NOT_IN_MODEL_KWARGS = {
    "num_classes": "the data set determines the number of classes",
    **{name: f"set model.{name}" for name in ("img_size", "in_chans", "drop_path_rate", "pretrained")},
}
# Arguments that the trainer passes to a data set's function in addition to its settings.
PASSED_TO_DATA = frozenset({"image_size", "in_chans", "seed", "train", "pin_memory", "shard"})


def _conflict(message: str, setting: str, value: object, **fields: object) -> UsageError:
    return UsageError(message, code="config.conflict", setting=setting, value=value, **fields)


def check_mode(mode: str, checkpoint: str | None, quant: QuantSettings) -> None:
    """Raise UsageError for a quantization scheme of the other mode."""
    scheme_mode = mode if quant.name == "none" else "eval" if quant.dtype is None else "train"
    if scheme_mode != mode:
        message = (
            f"quant={quant.name} requires mode={scheme_mode}: int8 and fp8 train, the others quantize trained weights"
        )
        raise _conflict(message, "quant.name", quant.name, mode=mode)


def check_evaluation(
    mode: str, checkpoint: str | None, evaluation: EvaluationSettings, model: ModelSettings, quant: QuantSettings
) -> None:
    """Raise UsageError for an evaluation without weights, and for a probe that cannot run."""
    probes = evaluation.name != "head"
    world = torchrun_environment.world_size()
    if probes and world > 1:
        raise UsageError(
            f"evaluation={evaluation.name} runs in one process on one device, but torchrun started {world}: start "
            "without torchrun, or use evaluation=head",
            code="evaluation.processes",
            devices=world,
        )
    if mode == "train" and probes:
        message = f"evaluation={evaluation.name} needs mode=eval: training evaluates the classifier head"
        raise _conflict(message, "evaluation.name", evaluation.name)
    if mode == "eval" and checkpoint is None and not (probes and model.pretrained):
        also = ", or model.pretrained=true for timm's" if probes else ""
        raise _conflict(f"mode=eval needs weights to evaluate: checkpoint=PATH{also}", "checkpoint", None)
    if probes and quant.name != "none":
        message = f"evaluation={evaluation.name} evaluates unquantized features: use quant=none"
        raise _conflict(message, "quant.name", quant.name)


def check_training(trainer: TrainerSettings, ema: EmaSettings) -> None:
    """Raise UsageError for values that would disable training or averaging."""
    if trainer.max_epochs == 0 and trainer.max_steps is None:
        raise _conflict(
            "trainer.max_epochs=0 trains nothing; to evaluate weights, set mode=eval checkpoint=PATH",
            "trainer.max_epochs",
            0,
        )
    if trainer.clip_grad == 0:
        raise _conflict(
            "trainer.clip_grad=0 would set all gradients to zero; null disables clipping", "trainer.clip_grad", 0
        )
    if ema.decay == 0:
        raise _conflict("ema.decay=0 would only copy the weights; null keeps no average", "ema.decay", 0)


def check_schedule(schedule: ScheduleSettings, lr: float) -> None:
    """Raise UsageError for a schedule that would raise the learning rate after warm-up."""
    if schedule.min_lr > lr:
        raise _conflict(
            f"schedule.min_lr={schedule.min_lr:g} exceeds optim.lr={lr:g}, so the rate would increase to it; "
            "lower it, or use schedule=constant to keep optim.lr",
            "schedule.min_lr",
            schedule.min_lr,
        )


def check_model(model: ModelSettings) -> None:
    """Raise UsageError for an argument of timm that has its own setting."""
    for name, instead in NOT_IN_MODEL_KWARGS.items():
        if name in model.kwargs:
            raise _conflict(
                f"model.kwargs.{name} is not allowed: {instead}", f"model.kwargs.{name}", model.kwargs[name]
            )


def check_data(data: DataSettings) -> None:
    """Raise UsageError if the data set's function cannot be imported or does not take one of the settings."""
    try:
        parameters = inspect.signature(pkgutil.resolve_name(data.target)).parameters
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"data._target_={data.target} is not an importable function ({error}). Select a built-in data set with "
            "data=digits, fake, imagefolder, shapes, shards or table, or set data._target_=MODULE.FUNCTION to your own",
            code="config.target",
            setting="data._target_",
            value=data.target,
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    missing = sorted({*PASSED_TO_DATA, "batch_size", "num_workers"} - parameters.keys())
    if missing:
        raise UsageError(
            f"data._target_={data.target} does not build a data set: it has no parameter {', '.join(missing)}. "
            "See vitkernels.data for its parameters, or select data=digits, fake, imagefolder, shapes, shards or table",
            code="config.target",
            setting="data._target_",
            value=data.target,
            missing=missing,
        )
    choices = sorted(parameters.keys() - PASSED_TO_DATA)
    for name in data.arguments:
        if name not in choices:
            near = difflib.get_close_matches(str(name), choices, n=2, cutoff=0.6)
            hint = f" Did you mean data.{' or data.'.join(near)}?" if near else ""
            raise UsageError(
                f"unknown setting data.{name}: {data.target} takes {', '.join(choices)}.{hint}",
                code="config.unknown",
                setting=f"data.{name}",
                choices=choices,
            )


def check_residual_precision(ops: OpsSettings, precision: str) -> None:
    """Raise UsageError for a residual stream with fewer bits than the layers compute in."""
    if ops.residual_precision == "bf16" and precision == "fp32":
        raise _conflict(
            "ops.residual_precision=bf16 needs 16-bit layers, but runtime.precision is fp32: set "
            "runtime.precision=bf16 or ops.residual_precision=null",
            "ops.residual_precision",
            "bf16",
            precision=precision,
        )
