"""Build the parts of a run from its configuration: data, model, optimizer and trainer.

The order of construction matters for exact reproducibility and is fixed by `build_model`: the EMA copies the model
before it moves to the device, the random stream of a rank starts after the weights are drawn, quantization precedes
the choice of fused ops, and the strategy wraps the model before the optimizer sees its parameters.
"""

import copy
import json
import logging
import pkgutil
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3, random_seed
from torch import nn

from vitkernels import attention, models, optim
from vitkernels.checkpoint import optimizer_state
from vitkernels.checkpoint.trained_on import TrainedOn, read_trained_on
from vitkernels.config import COMPILE_MODES, Config
from vitkernels.data import Data, Shard
from vitkernels.errors import UsageError
from vitkernels.parallel import Parallel
from vitkernels.parallel.compile_options import compile_options, uses_cuda_graphs
from vitkernels.quant import Scheme, quantize_, train_in_8_bits
from vitkernels.runtime.base import PRECISIONS
from vitkernels.training import objective, source
from vitkernels.training.memory_check import check_memory
from vitkernels.training.plan import StepPlan
from vitkernels.training.trainer import Trainer

log = logging.getLogger("vitkernels")


@dataclass(frozen=True)
class ModelParts:
    """A model as training and evaluation use it.

    model: with timm's parameter names. net: the same parameters, wrapped by the strategy and torch.compile; call it.
    ema, ema_net: the average of the weights, None without one. quantized, quantized_net: the copy that mode=eval
    quantizes, None otherwise. facts: parameters, FLOPs, attention calls. attn: the chosen attention backend's name.
    """

    model: nn.Module
    net: nn.Module
    facts: models.ModelFacts
    attn: str
    ema: ModelEmaV3 | None = None
    ema_net: nn.Module | None = None
    quantized: nn.Module | None = None
    quantized_net: nn.Module | None = None


@dataclass(frozen=True)
class Optimization:
    """The optimizer, its learning rate schedule and the fp16 loss scaler."""

    optimizer: torch.optim.Optimizer
    scheduler: Scheduler
    scaler: torch.amp.GradScaler


def compile_mode(cfg: Config, parallel: Parallel) -> tuple[bool, str | None]:
    """Return whether the model is compiled, and torch.compile's mode.

    Batches have one shape, so with compile=auto CUDA graphs are recorded wherever `_no_cuda_graphs` has no objection.
    """
    if cfg.compile != "auto":
        return bool(cfg.compile), cfg.compile if cfg.compile in COMPILE_MODES else None
    if not parallel.runtime.compiles_by_default:
        return False, None
    return True, "reduce-overhead" if _no_cuda_graphs(cfg, parallel) is None else None


def _no_cuda_graphs(cfg: Config, parallel: Parallel) -> str | None:
    """Return why compile=auto records no CUDA graphs; None if it does."""
    if not parallel.runtime.has_cuda_graphs:
        return f"{parallel.runtime.name} has none"
    if cfg.mode == "eval":
        return "an evaluation repeats too few steps"
    return parallel.no_cuda_graphs()


def _describe_compilation(cfg: Config, parallel: Parallel) -> str:
    """Return what is compiled and how, as text for a log; "" if nothing is."""
    compiled, mode = compile_mode(cfg, parallel)
    if not compiled:
        return ""
    if cfg.compile != "auto":
        return ", torch.compile" + (f" ({mode})" if mode else "")
    if mode:
        return f", torch.compile with CUDA graphs (auto: {mode})"
    return f", torch.compile without CUDA graphs (auto: {_no_cuda_graphs(cfg, parallel)})"


def log_runtime(cfg: Config, parallel: Parallel) -> None:
    """Log the device, the strategy and the compilation; raise UsageError if processes got different settings."""
    settings = cfg.to_dict()
    settings["data"].pop("root", None)  # may differ between hosts
    parallel.expect_same("the settings", settings, "start train.py with the same command on every host")
    how = _describe_compilation(cfg, parallel)
    log.info("runtime: %s, %s%s", parallel.runtime.describe(), parallel.describe(), how)


def read_source(cfg: Config, parallel: Parallel) -> TrainedOn:
    """Return the class names and preprocessing of the weights in `checkpoint`."""
    if cfg.checkpoint is None:
        return TrainedOn()
    return parallel.load(read_trained_on, Path(cfg.checkpoint))


def build_data(cfg: Config, parallel: Parallel, trained_on: TrainedOn) -> Data:
    """Build the data set that the configuration names.

    Preprocessing settings that are null take the values that the weights were trained with or, if unknown, timm's
    values for the model.
    """
    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)
    arguments = {**cfg.data.arguments, "batch_size": cfg.data.batch_size * parallel.local_devices}
    preprocessing = trained_on.preprocessing or models.preprocessing(cfg.model.name)
    arguments |= {key: value for key, value in preprocessing.items() if arguments.get(key, "") is None}
    data: Data = pkgutil.resolve_name(cfg.data.target)(
        image_size=image_size,
        in_chans=in_chans,
        seed=cfg.seed,
        train=cfg.mode == "train" or cfg.evaluation.name != "head",
        pin_memory=parallel.runtime.pins_memory,
        shard=Shard(parallel.rank, parallel.world),
        **arguments,
    )
    if not isinstance(data, Data):
        raise UsageError(
            f"data._target_={cfg.data.target} returned {type(data).__name__}, not a vitkernels.data.Data",
            code="config.target",
            setting="data._target_",
            value=cfg.data.target,
        )
    sizes = "" if data.train is None else f"{data.train.num_samples} training images, "
    sizes += f"{data.val.num_samples} evaluation images"
    parallel.expect_same("the data sets", (sizes, data.num_classes), "every host needs the same files")
    prepared = "".join(f", {key} {value}" for key, value in (data.preprocessing or {}).items())
    log.info("data: %s, %d classes, %d px%s", sizes, data.num_classes, image_size, prepared)
    return data


def build_model(cfg: Config, parallel: Parallel, data: Data, trained_on: TrainedOn) -> ModelParts:
    """Build the model with its attention backend and fused ops, load its weights and wrap it for the strategy."""
    runtime = parallel.runtime
    facts, attn, model = _create(cfg, parallel, data)
    if cfg.checkpoint is not None:
        _load_weights(cfg, parallel, model, data, trained_on)
    # Create the EMA before the model moves: it makes a torch.Generator on the model's device, and XLA has none.
    ema = None
    if cfg.ema.decay is not None and cfg.mode == "train":
        ema = ModelEmaV3(model, cfg.ema.decay, use_warmup=cfg.ema.warmup)
    for module in filter(None, (model, ema)):
        module.to(runtime.device)
    if cfg.distill.teacher is not None and cfg.mode == "train":
        models.answer_with_both_heads(model)
    if parallel.stream:
        random_seed(cfg.seed, parallel.stream)  # ranks have equal weights and draw different drop paths
    quantized = _quantize(cfg, model)
    ops = {op: getattr(cfg.ops, op) for op in models.MODEL_OPS}
    options = _op_options(cfg, parallel, model, ops)
    for module in filter(None, (model, quantized, ema and ema.module)):
        models.set_ops(module, ops, *options)
    in_8_bits = "" if cfg.quant.name == "none" else f", quant {cfg.quant.name}"
    size, ops_text = f"{facts.parameters / 1e6:.1f} M parameters", models.describe_ops(ops, runtime.device)
    log.info("model: %s, %s, attention %s, ops %s%s", cfg.model.name, size, attn, ops_text, in_8_bits)

    def wrap(module: nn.Module) -> nn.Module:
        return parallel.wrap(module, *compile_mode(cfg, parallel))

    return ModelParts(
        model=model,
        net=wrap(model),
        facts=facts,
        attn=attn,
        ema=ema,
        ema_net=None if ema is None else wrap(ema.module),
        quantized=quantized,
        quantized_net=None if quantized is None else wrap(quantized),
    )


def _op_options(
    cfg: Config, parallel: Parallel, model: nn.Module, ops: dict[str, str]
) -> tuple[torch.dtype | None, bool]:
    """Return the residual stream's dtype (None for timm's) and whether MLP activations are kept.

    speed=max adds what the device and the model support, and the log says what.
    """
    runtime = parallel.runtime
    residual, keep = cfg.ops.residual_precision, cfg.ops.keep_activation
    if cfg.speed == "max":
        fused = models.fused_by(model, ops, runtime.device)
        added = []
        if residual is None and runtime.precision == "bf16" and "layer_norm_residual" in fused:
            residual = "bf16"
            added.append("the residual stream is rounded to bf16")
        if not keep and "mlp" in fused:
            keep = True
            added.append("MLP activations stay in memory for the backward pass")
        nothing = f"adds nothing here (device {runtime.device.type}, {runtime.precision}, fused ops: {len(fused)})"
        log.info("speed=max: %s", "; ".join(added) or nothing)
    return None if residual is None else PRECISIONS[residual], keep


def model_arguments(cfg: Config) -> dict:
    """Return the arguments that decide what the model computes, in addition to its name, as JSON has them."""
    sizes = {"img_size": cfg.model.img_size, "in_chans": cfg.model.in_chans}
    given = {name: value for name, value in {**cfg.model.kwargs, **sizes}.items() if value is not None}
    return json.loads(json.dumps(given))


def _create(cfg: Config, parallel: Parallel, data: Data) -> tuple[models.ModelFacts, str, nn.Module]:
    """Return the model's facts, the chosen attention backend's name, and the model with that backend."""
    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)

    def build(backend: attention.AttentionBackend, pretrained: bool | None = None) -> nn.Module:
        return models.create_model(
            cfg.model.name,
            backend,
            num_classes=data.num_classes,
            img_size=cfg.model.img_size,
            in_chans=in_chans,
            drop_path_rate=cfg.model.drop_path_rate,
            pretrained=pretrained,
            **cfg.model.kwargs,
        )

    facts = models.inspect_model(
        build,
        image_size=image_size,
        in_chans=in_chans,
        batch_size=cfg.data.batch_size,
        dtype=parallel.runtime.dtype,
        device_type=parallel.runtime.device.type,
    )
    attn = attention.choose_for_all(cfg.attn.name, facts.attention)
    check_memory(
        facts,
        parallel.runtime,
        image_size=image_size,
        batch_size=cfg.data.batch_size,
        training=cfg.mode == "train",
        keeps_scores=attn == "native" and not compile_mode(cfg, parallel)[0],
    )
    backend = attention.configured(attn, cfg.attn.options)
    return facts, attn, build(backend, pretrained=cfg.model.pretrained or None)


def _load_weights(cfg: Config, parallel: Parallel, model: nn.Module, data: Data, trained_on: TrainedOn) -> None:
    weights = parallel.load(models.read_state_dict, cfg.checkpoint)
    if trained_on.class_names is None:
        outputs = len(weights.get("head.weight", ()))
        parallel.on_main(source.warn_of_timm_class_order, cfg.checkpoint, outputs, data.class_names)
    if cfg.mode == "eval" and cfg.evaluation.name == "head":
        parallel.on_main(source.check_data, cfg.checkpoint, trained_on, data.class_names, data.preprocessing)
    else:
        new_classes = trained_on.class_names not in (None, data.class_names)
        weights = models.adapt_state_dict(weights, model, new_classes)
    models.load_weights(model, weights, str(cfg.checkpoint))


def _quantize(cfg: Config, model: nn.Module) -> nn.Module | None:
    """Make the model's linear layers train in 8 bits, or return a quantized copy of it for mode=eval."""
    if cfg.quant.name == "none":
        return None

    def selected(name: str, _: nn.Module) -> bool:
        return not name.endswith(tuple(cfg.quant.skip))

    q = cfg.quant  # Config has checked which of its settings belong to the mode
    if cfg.mode == "train":
        assert q.dtype is not None
        train_in_8_bits(model, q.dtype, selected)
        return None
    assert q.weight_bits is not None and q.activation_bits is not None
    quantized = copy.deepcopy(model)
    scheme = Scheme(q.weight_bits, q.activation_bits, q.block_size, q.symmetric, bool(q.fp8))
    quantize_(quantized, scheme, selected, backend=q.backend)
    return quantized


def build_plan(cfg: Config, parallel: Parallel, data: Data) -> StepPlan:
    """Return the run's step plan."""
    assert data.train is not None, "mode=train builds a training split"
    return StepPlan.of(
        cfg.trainer,
        cfg.checkpoints,
        batches_per_epoch=data.train.batches_per_epoch,
        images_per_batch=data.train.batch_size * parallel.world,
    )


def build_optimizer(cfg: Config, parallel: Parallel, model: nn.Module, plan: StepPlan) -> Optimization:
    """Build the optimizer, whose parameters must be those of the wrapped model, and its schedule over the run."""
    optimizer = optim.create_optimizer(
        model,
        cfg.optim.opt,
        lr=cfg.optim.lr,
        weight_decay=cfg.optim.weight_decay,
        layer_decay=cfg.optim.layer_decay,
        kwargs=cfg.optim.kwargs,
        defaults=parallel.runtime.optimizer_kwargs(cfg.optim.opt),
        kernel=cfg.ops.adamw,
    )
    optimizer_state.check(optimizer, cfg.optim.opt)
    parallel.prepare(optimizer)
    requested = plan.warmup_steps(cfg.schedule.warmup_epochs, None)
    warmup = plan.warmup_steps(cfg.schedule.warmup_epochs, cfg.schedule.warmup_cap)
    log.info("%d steps of %d images, %s, lr %g", plan.total_steps, plan.images_per_step, cfg.optim.opt, cfg.optim.lr)
    if warmup < requested:
        cap = cfg.schedule.warmup_cap
        log.info("learning-rate warm-up shortened from %d to %d steps (schedule.warmup_cap=%g)", requested, warmup, cap)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=cfg.schedule.sched,
        num_epochs=plan.total_steps,  # the schedule counts steps: an "epoch" has one update
        warmup_epochs=warmup,
        warmup_lr=cfg.schedule.warmup_lr,
        min_lr=cfg.schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return Optimization(optimizer, scheduler, parallel.runtime.grad_scaler())


def build_trainer(
    cfg: Config, parallel: Parallel, data: Data, parts: ModelParts, plan: StepPlan, optimization: Optimization
) -> Trainer:
    """Return the trainer, at step 0, without a run folder and ready for `train_step`."""
    loss_fn = objective.loss_of(cfg, data)
    compiled, mode = compile_mode(cfg, parallel)
    return Trainer(
        parallel,
        plan,
        data,
        parts.model,
        parts.net,
        optimization.optimizer,
        optimization.scheduler,
        optimization.scaler,
        loss_fn,
        distillation=objective.distillation_of(cfg, data, loss_fn, parallel.runtime, compiled),
        ema=parts.ema,
        ema_net=parts.ema_net,
        clip_grad=cfg.trainer.clip_grad,
        cuda_graphs=uses_cuda_graphs(compile_options(compiled, mode)),
        untimed_steps=cfg.trainer.warmup_steps,
        flops_per_image=parts.facts.train_flops_per_image,
    )


def trainer_from_config(cfg: Config, parallel: Parallel) -> tuple[Trainer, ModelParts]:
    """Build everything that a training step needs, in order, without a run: for benchmarks and recorders.

    Seeds all random generators. Call `trainer.train_step(batches)` with device batches, such as `parallel.feed` gives.
    """
    random_seed(cfg.seed)
    trained_on = read_source(cfg, parallel)
    data = build_data(cfg, parallel, trained_on)
    parts = build_model(cfg, parallel, data, trained_on)
    plan = build_plan(cfg, parallel, data)
    optimization = build_optimizer(cfg, parallel, parts.model, plan)
    return build_trainer(cfg, parallel, data, parts, plan, optimization), parts


def notes_of(cfg: Config, data: Data) -> dict:
    """Return the data's metadata for checkpoints and exported weights: class names and preprocessing.

    Preprocessing has `input_size`, as timm's pretrained_cfg; it is None if the data set prepares no image files.
    """
    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)

    def with_size(preprocessing: dict) -> dict:
        return {"input_size": [in_chans, image_size, image_size], **preprocessing}

    notes: dict = {"class_names": data.class_names}
    notes |= {"preprocessing": with_size(data.preprocessing) if data.preprocessing else data.preprocessing}
    if data.file_preprocessing is not None:
        notes |= {"file_preprocessing": with_size(data.file_preprocessing)}
    return notes
