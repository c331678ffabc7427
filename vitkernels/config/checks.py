"""Checks of what was set, before any work is done that a wrong value would lose."""

import inspect
import pkgutil

from omegaconf import DictConfig, OmegaConf

from vitkernels.errors import UsageError, unknown_name

# setting: (type, least value, greatest value or None, whether null is allowed)
_NUMBERS = {
    "seed": (int, 0, 2**31, False),  # NumPy takes 32 bits, and ranks are added to it
    "parallel.lost_after": (float, 0, None, False),
    "trainer.max_epochs": (float, 0, None, False),
    "trainer.max_steps": (int, 1, None, True),
    "trainer.accum_steps": (int, 1, None, False),
    "trainer.clip_grad": (float, 0, None, True),
    "trainer.label_smoothing": (float, 0, 1, False),
    "trainer.log_every": (int, 1, None, False),
    "trainer.eval_every": (int, 1, None, True),
    "trainer.warmup_steps": (int, 0, None, False),
    "ema.decay": (float, 0, 1, True),
    "checkpoints.every_epochs": (int, 1, None, True),
    "checkpoints.every_steps": (int, 1, None, True),
    "checkpoints.keep": (int, 1, None, False),
    "data.batch_size": (int, 1, None, False),
    "data.num_workers": (int, 0, None, False),
    "model.img_size": (int, 1, None, True),
    "model.in_chans": (int, 1, None, True),
    "model.drop_path_rate": (float, 0, 1, True),
    "optim.lr": (float, 0, None, False),
    "optim.weight_decay": (float, 0, None, False),
    "optim.layer_decay": (float, 1e-6, 1, True),
    "schedule.warmup_epochs": (float, 0, None, False),
    "schedule.warmup_cap": (float, 0, 1, True),
    "schedule.warmup_lr": (float, 0, None, False),
    "schedule.min_lr": (float, 0, None, False),
}
_NAMES = (
    "attn.name", "ops.name", "quant.name", "model.name", "data._target_", "optim.opt", "runtime.name",
)  # fmt: skip
COMPILE_MODES = ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")  # torch.compile's own
_CHOICES = {
    "mode": ("train", "eval"),
    "compile": (True, False, "auto", *COMPILE_MODES),
    # Of timm's schedules, those that are scaled to the length of training: ours count steps, and the others' numbers
    # are epochs.
    "schedule.sched": ("cosine", "tanh", "poly"),
    "ops.name": ("eager", "fused", "auto"),
    "ops.adamw": ("eager", "auto", "triton"),
    "ops.residual_precision": (None, "fp32", "bf16"),
    "ops.keep_activation": (True, False),
    "trainer.profile": (True, False),
    "ema.warmup": (True, False),
    "sweep.rerun": (True, False),
    "parallel.reshard": (True, False),
}

# What train.py passes to timm by itself, and where it is set.
_NOT_KWARGS = {
    "num_classes": "the data set has the number of classes",
    **{name: f"it is model.{name}" for name in ("img_size", "in_chans", "drop_path_rate", "pretrained")},
}
# What it passes to a data set's function, beside its settings.
_GIVEN_TO_DATA = {"image_size", "in_chans", "seed", "train", "pin_memory", "shard"}


def check_settings(cfg: DictConfig) -> None:
    """Raise UsageError for the first setting whose value has the wrong type or lies out of range."""
    for name in _NAMES:
        value = OmegaConf.select(cfg, name, throw_on_missing=False)
        if not isinstance(value, str):
            raise UsageError(f"{name} must be a name, got {value!r}")
    for name, choices in _CHOICES.items():
        value = OmegaConf.select(cfg, name)
        if value not in choices:
            raise UsageError(f"{name} must be one of {', '.join(map(str, choices))}; got {value!r}")
    for name, (kind, least, greatest, nullable) in _NUMBERS.items():
        value = OmegaConf.select(cfg, name)
        allowed = (int,) if kind is int else (int, float)
        fits = isinstance(value, allowed) and not isinstance(value, bool)
        fits = fits and least <= value and (greatest is None or value <= greatest)
        if not fits and not (nullable and value is None):
            what = "a whole number" if kind is int else "a number"
            span = f"of at least {least}" if greatest is None else f"from {least} to {greatest}"
            raise UsageError(f"{name} must be {what} {span}{', or null' if nullable else ''}; got {value!r}")
    _check_data(cfg.data)
    for name, instead in _NOT_KWARGS.items():
        if name in cfg.model.kwargs:
            raise UsageError(f"model.kwargs.{name} is not timm's to take from there: {instead}")
    for name in ("resume", "checkpoint"):
        value = OmegaConf.select(cfg, name)
        if not (value is None or isinstance(value, str)):
            raise UsageError(f"{name} must be a path{', auto' if name == 'resume' else ''} or null; got {value!r}")
    if cfg.trainer.max_epochs == 0 and cfg.trainer.max_steps is None:
        raise UsageError("trainer.max_epochs=0 trains nothing; mode=eval checkpoint=PATH evaluates weights")
    if cfg.trainer.clip_grad == 0:
        raise UsageError("trainer.clip_grad=0 would let no weight move; null does not clip")
    if cfg.ema.decay == 0:
        raise UsageError("ema.decay=0 would keep nothing but the weights themselves; null keeps no average")
    if cfg.mode == "eval" and cfg.checkpoint is None:
        raise UsageError("mode=eval needs the weights to evaluate: checkpoint=PATH")
    takes = cfg.mode if cfg.quant.name == "none" else "train" if "dtype" in cfg.quant else "eval"
    if takes != cfg.mode:
        raise UsageError(
            f"quant={cfg.quant.name} is for mode={takes}; int8 and fp8 train, the others quantize trained weights"
        )


def _check_data(data: DictConfig) -> None:
    """Raises UsageError where there is no such function, or it takes no such setting."""
    target = data._target_
    try:
        taken = inspect.signature(pkgutil.resolve_name(target)).parameters
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise UsageError(
            f"data._target_={target} is no function that can be imported ({error}); data=digits, data=fake and "
            "data=imagefolder name theirs, an own one is MODULE.FUNCTION"
        ) from error
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken.values()):
        return
    choices = taken.keys() - _GIVEN_TO_DATA
    for name in data.keys() - {"_target_"}:
        if name not in choices:
            raise unknown_name(f"data setting (of {target})", str(name), choices)


def check_precision(cfg: DictConfig, precision: str) -> None:
    """Raises UsageError where the runtime's precision (fp32, bf16 or fp16) does not go with the settings."""
    if cfg.ops.residual_precision == "bf16" and precision == "fp32":
        raise UsageError(
            "ops.residual_precision=bf16 is for layers that calculate in 16 bits, and runtime.precision is fp32 here: "
            "runtime.precision=bf16, or ops.residual_precision=null"
        )
