"""Train or evaluate a vision transformer: `python train.py --help`.

One straight line: config, runtime, data, model, optimizer, state, loop, summary. Every part is built from plain
arguments by the package it belongs to; the configuration is read only here.
"""

import os

# Set before torch loads. OpenMP threads that spin for long while they wait slow training tenfold where processes share
# cores; those that sleep at once slow it threefold where they do not.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import contextlib
import copy
import gc
import json
import logging
import math
import sys
import time
from collections import deque
from functools import partial
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_method
from omegaconf import DictConfig, OmegaConf
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.utils import ModelEmaV3, random_seed

from vitkernels import attention, models
from vitkernels import parallel as parallels
from vitkernels import runtime as runtimes
from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.checkpoint import optimizer_state
from vitkernels.cli import command_line
from vitkernels.config.checks import COMPILE_MODES, check_precision, check_settings
from vitkernels.data.loader import BadImagesError, Shard, WorkerDiedError
from vitkernels.errors import UsageError
from vitkernels.optim import with_kernel
from vitkernels.parallel import Parallel
from vitkernels.provenance import git_commit, versions
from vitkernels.quant import Scheme, quantize_, size_in_bytes, train_in_8_bits
from vitkernels.runtime.base import PRECISIONS
from vitkernels.sweep import job
from vitkernels.training import run_dir as run_folder
from vitkernels.training.evaluate import evaluate
from vitkernels.training.history import History, NonFiniteLossError, check_finite, parameters_without_gradient
from vitkernels.training.loss import mean_loss
from vitkernels.training.run_log import NoLog, RunLog
from vitkernels.training.signals import EXIT_INTERRUPTED, StopRequest
from vitkernels.training.step_timer import StepTimer
from vitkernels.training.stragglers import name_late_host, name_straggler
from vitkernels.training.summary import log_evaluation, log_window, mfu, report
from vitkernels.training.trace import PROFILED_STEPS, start_profiler

log = logging.getLogger("vitkernels")

SETTLING_STEPS = 4  # after these, all that lives as long as the run has been made
RECENT_STEPS = 20  # whose mean loss is the one that a run ends with


def run(cfg: DictConfig, run_dir: Path, create_runtime=runtimes.create) -> None:
    """Do what `cfg` says, in the folder `run_dir`, on the runtime that `create_runtime(name, precision)` makes."""
    check_settings(cfg)
    is_ours = not run_folder.is_taken(run_dir)  # a folder that turns out to be another run's is left as it is
    try:
        runtime = create_runtime(cfg.runtime.name, cfg.runtime.precision)
        check_precision(cfg, runtime.precision)
        # Whatever happens, logs are closed, and the signals and the folder given back.
        with (
            parallels.create(runtime=runtime, accum_steps=cfg.trainer.accum_steps, **cfg.parallel) as parallel,
            contextlib.ExitStack() as cleanup,
        ):
            if cfg.mode == "train":
                parallel.on_main(cleanup.enter_context, run_folder.held(run_dir))
            run_dir, done = parallel.on_main(run_folder.open_for, run_dir, cfg)
            is_ours = True
            if done:
                log.info("this run is done: %s", run_dir / "summary.json")
                return
            train_or_evaluate(cfg, run_dir, parallel, cleanup)
    except run_folder.InUseError:
        raise
    except Exception as error:
        if is_ours and parallels.is_main(cfg.runtime.name):
            run_folder.note_failure(run_dir, str(error) or type(error).__name__)
        raise


def train_or_evaluate(cfg: DictConfig, run_dir: Path, parallel: Parallel, cleanup: contextlib.ExitStack) -> None:
    # ------------------------------------------------------------------ config
    begin = time.time()
    random_seed(cfg.seed)
    model_kwargs, optim_kwargs = (
        OmegaConf.to_container(group.kwargs, resolve=True) for group in (cfg.model, cfg.optim)
    )
    attn_options = {k: v for k, v in OmegaConf.to_container(cfg.attn, resolve=True).items() if k != "name"}

    settings = OmegaConf.to_container(cfg, resolve=True)
    settings["data"].pop("root", None)  # hosts may have their files in different places
    parallel.expect_same("the settings", settings, "start train.py with the same command everywhere")

    # ------------------------------------------------------------------ runtime
    runtime = parallel.runtime
    compiled = runtime.compiles_by_default if cfg.compile == "auto" else bool(cfg.compile)
    compile_mode = cfg.compile if cfg.compile in COMPILE_MODES else None
    how = ", torch.compile" + (f" ({compile_mode})" if compile_mode else "") if compiled else ""
    log.info("runtime: %s, %s%s", runtime.describe(), parallel.describe(), how)

    # ------------------------------------------------------------------ data
    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)
    data_args = OmegaConf.to_container(cfg.data, resolve=True)
    data_args["batch_size"] *= parallel.local_devices
    # How images are prepared, where the data set leaves it open: as for the weights' training, else as timm does.
    there = {} if cfg.checkpoint is None else parallel.load(run_folder.learned_from, Path(cfg.checkpoint))
    preprocessing = there.get("preprocessing") or models.preprocessing(cfg.model.name)
    data_args |= {key: value for key, value in preprocessing.items() if data_args.get(key, "") is None}
    build_data = get_method(data_args.pop("_target_"))  # called here and not by Hydra, which would wrap its errors
    data = build_data(
        image_size=image_size,
        in_chans=in_chans,
        seed=cfg.seed,
        train=cfg.mode == "train",
        pin_memory=runtime.pins_memory,
        shard=Shard(parallel.rank, parallel.world),
        **data_args,
    )
    sizes = "" if data.train is None else f"{data.train.num_samples} images to train, "
    sizes += f"{data.val.num_samples} to evaluate"
    parallel.expect_same("the data sets", (sizes, data.num_classes), "every host needs the same files")
    prepared = "".join(f", {key} {value}" for key, value in (data.preprocessing or {}).items())
    log.info("data: %s, %d classes, %d px%s", sizes, data.num_classes, image_size, prepared)

    # ------------------------------------------------------------------ model
    def build(backend, pretrained=None):
        return models.create_model(
            cfg.model.name,
            backend,
            num_classes=data.num_classes,
            img_size=cfg.model.img_size,
            in_chans=in_chans,
            drop_path_rate=cfg.model.drop_path_rate,
            pretrained=pretrained,
            **model_kwargs,
        )

    facts = models.inspect_model(
        build,
        image_size=image_size,
        in_chans=in_chans,
        batch_size=cfg.data.batch_size,
        dtype=runtime.dtype,
        device_type=runtime.device.type,
    )
    attn = attention.choose_for_all(cfg.attn.name, facts.attention)
    backend = attention.get(attn).configured(**attn_options)
    model = build(backend, pretrained=cfg.model.pretrained or None)
    if cfg.checkpoint is not None:
        weights = parallel.load(models.read_state_dict, cfg.checkpoint)
        if there["class_names"] is None:
            outputs = len(weights.get("head.weight", ()))
            parallel.on_main(run_folder.name_order_of_timm, cfg.checkpoint, outputs, data.class_names)
        if cfg.mode == "eval":
            parallel.on_main(run_folder.check_data, cfg.checkpoint, there, data.class_names, data.preprocessing)
        else:
            weights = models.fitted(weights, model, there["class_names"] not in (None, data.class_names))
        models.load_weights(model, weights, cfg.checkpoint)
    # Before the model moves: it makes a torch.Generator on the model's device, and XLA devices have none.
    ema = ModelEmaV3(model, cfg.ema.decay, use_warmup=cfg.ema.warmup) if cfg.ema.decay and cfg.mode == "train" else None
    for module in filter(None, (model, ema)):
        module.to(runtime.device)
    if parallel.stream:
        random_seed(cfg.seed, parallel.stream)  # the same weights everywhere, but each its own drop path
    quantized = None
    if cfg.quant.name != "none":
        skip = tuple(cfg.quant.skip)
        if cfg.mode == "train":
            train_in_8_bits(model, cfg.quant.dtype, lambda name, _: not name.endswith(skip))
        else:
            q = cfg.quant
            scheme = Scheme(q.weight_bits, q.activation_bits, q.block_size, q.symmetric, q.get("fp8", False))
            quantized = copy.deepcopy(model)
            quantize_(quantized, scheme, lambda name, _: not name.endswith(skip), backend=cfg.quant.backend)
    ops = {op: cfg.ops[op] for op in models.MODEL_OPS}
    for module in filter(None, (model, quantized, ema and ema.module)):
        models.set_ops(module, ops, PRECISIONS.get(cfg.ops.residual_precision), cfg.ops.keep_activation)
    loss_of = mean_loss(cfg.ops.cross_entropy, cfg.trainer.label_smoothing)
    net = parallel.wrap(model, compiled, compile_mode)  # the same parameters; `model` keeps timm's names
    ema_net = None if ema is None else parallel.wrap(ema.module, compiled, compile_mode)
    size = f"{facts.parameters / 1e6:.1f} M parameters"
    in_8_bits = "" if cfg.quant.name == "none" else f", quant {cfg.quant.name}"
    log.info("model: %s, %s, attention %s, ops %s%s", cfg.model.name, size, attn, models.ops_in_words(ops), in_8_bits)

    if cfg.mode == "eval":
        runtime.synchronize()  # what quantizing left to do is not evaluation
        result = evaluate(net, data.val, parallel) | {"bytes": size_in_bytes(model)}
        if quantized is not None:
            before = {f"{name}_before": result[name] for name in ("top1", "images_per_s", "bytes")}
            quantized_net = parallel.wrap(quantized, compiled, compile_mode)
            result = evaluate(quantized_net, data.val, parallel, "quantized eval") | before
            result["bytes"] = size_in_bytes(quantized)
        card = {"checkpoint": cfg.checkpoint, "model": cfg.model.name, "attn": attn, "quant": cfg.quant.name}
        card |= {"git_commit": git_commit(), "settings": run_folder.identity(cfg), "preprocessing": data.preprocessing}
        card |= result
        parallel.on_main(run_folder.write_json, run_dir / "eval.json", card)
        log_evaluation(result)
        return

    # ------------------------------------------------------------------ optimizer
    train, accum = data.train, cfg.trainer.accum_steps
    images_per_step = train.batch_size * parallel.world * accum
    steps_per_epoch = train.batches_per_epoch // accum
    if steps_per_epoch == 0:
        raise UsageError(
            f"trainer.accum_steps={accum} needs {accum} batches for one step, but an epoch has "
            f"{train.batches_per_epoch}; lower it or data.batch_size"
        )
    total_steps = cfg.trainer.max_steps or math.ceil(cfg.trainer.max_epochs * steps_per_epoch)
    try:
        optimizer = create_optimizer_v2(
            model,
            opt=cfg.optim.opt,
            lr=cfg.optim.lr,
            weight_decay=cfg.optim.weight_decay,
            layer_decay=cfg.optim.layer_decay,
            **{**runtime.optimizer_kwargs(cfg.optim.opt), **optim_kwargs},
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise UsageError(f"optim.opt={cfg.optim.opt} with these settings cannot be built by timm: {error}") from error
    optimizer = with_kernel(optimizer, cfg.ops.adamw)
    optimizer_state.check(optimizer, cfg.optim.opt)
    parallel.prepare(optimizer)
    asked, cap = round(cfg.schedule.warmup_epochs * steps_per_epoch), cfg.schedule.warmup_cap
    warmup_steps = asked if cap is None else min(asked, int(cap * total_steps))
    log.info("%d steps of %d images, %s, lr %g", total_steps, images_per_step, cfg.optim.opt, cfg.optim.lr)
    if warmup_steps < asked:
        log.info("warm-up: %d steps, schedule.warmup_cap=%g of the run, and not %d", warmup_steps, cap, asked)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched=cfg.schedule.sched,
        num_epochs=total_steps,  # the schedule's unit is the step: one "epoch" of one update
        warmup_epochs=warmup_steps,
        warmup_lr=cfg.schedule.warmup_lr,
        min_lr=cfg.schedule.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    scaler = runtime.grad_scaler()

    # ------------------------------------------------------------------ state
    checkpoints = ckpt.Checkpoints(
        run_dir / "checkpoints", cfg.checkpoints.keep, parallel.checkpoint_group, parallel.writes
    )
    step, best, result, eval_pending = 0, {"top1": -1.0, "step": 0}, {}, False
    recent_losses = deque(maxlen=RECENT_STEPS)
    identifying = {
        "model_name": cfg.model.name,
        "seed": cfg.seed,
        "images_per_step": images_per_step,
        "steps_per_epoch": steps_per_epoch,
        "optimizer_name": cfg.optim.opt,
        "has_ema": ema is not None,
    }
    path = parallel.on_main(run_folder.find_checkpoint, run_dir, cfg, checkpoints)
    if path is not None:
        load_tensors = partial(parallel.load, ckpt.load_tensors)
        state = parallel.load(ckpt.load_state, path)
        run_folder.refuse_other_run(path, state, identifying, total_steps)
        there = parallel.load(run_folder.learned_from, path)
        parallel.on_main(run_folder.check_data, path, there, data.class_names, data.preprocessing)
        if state["step"] == total_steps and parallel.on_main(run_folder.take_summary_back, run_dir, cfg, total_steps):
            log.info("this run is done: %s", run_dir / "summary.json")
            return
        models.load_weights(model, load_tensors(path, "model", model.state_dict()), str(path))
        optimizer_state.load(optimizer, model, path, state["optimizer"], load_tensors)
        parallel.place_state(optimizer)
        if state["scaler"]:  # empty in a run that went on from another precision
            scaler.load_state_dict(state["scaler"])
        if ema is not None:
            models.load_weights(ema.module, load_tensors(path, "ema", ema.module.state_dict()), str(path))
        streams = load_tensors(path, "rng")
        if str(parallel.stream) in streams:  # a process more than there were begins streams of its own
            ckpt.set_rng_state(streams[str(parallel.stream)], runtime)
        step, best, result = state["step"], state["best"], state["result"]
        recent_losses.extend(state.get("recent_losses", []))  # checkpoints have not always had them
        eval_pending = state["eval_pending"]
        begin -= state.get("seconds", 0)
        if parallel.is_main:  # in a folder of its own too the run has the best checkpoint that it speaks of
            checkpoints.mark_best(path.with_name(ckpt.folder_name(best["step"])))
        log.info("resumed from %s at step %d of %d", path, step, total_steps)
    scheduler.step_update(step)
    of_timm = data.preprocessing and {"input_size": [in_chans, image_size, image_size], **data.preprocessing}
    learned = {"class_names": data.class_names, "preprocessing": of_timm}
    parallel.on_main(partial(run_folder.begin, **learned), run_dir, cfg, path is not None)
    run_log = RunLog(run_dir, total_steps, step, evaluates_first=eval_pending) if parallel.is_main else NoLog()
    cleanup.callback(run_log.close)
    card = {"command": " ".join(sys.argv), "versions": versions(), "git commit": git_commit()}
    run_log.card(
        "run", f"```yaml\n{OmegaConf.to_yaml(cfg, resolve=True)}```\n```json\n{json.dumps(card, indent=1)}\n```"
    )

    def save() -> Path:
        run_log.sync()
        tensors, rest = optimizer_state.pack(optimizer, model)
        tensors = ckpt.named("optimizer", tensors) | ckpt.named("model", model.state_dict())
        tensors |= {} if ema is None else ckpt.named("ema", ema.module.state_dict())
        tensors[f"rng/{parallel.stream}"] = ckpt.rng_state(runtime)
        state = {
            **identifying,
            "optimizer": rest,
            "scaler": scaler.state_dict(),
            "best": best,
            "result": result,
            "recent_losses": list(recent_losses),
            "seconds": time.time() - begin,
            "eval_pending": eval_due,
            **learned,
        }
        return checkpoints.save(tensors, state, step)

    def evaluate_now(saved: Path | None) -> None:
        """Evaluate, log, and keep the checkpoint of this step if the weights in it are the best so far."""
        nonlocal result, best
        result = evaluate(net, data.val, parallel)
        if ema_net is not None:
            of_ema = evaluate(ema_net, data.val, parallel, "EMA eval")
            result |= {f"ema_{k}": v for k, v in of_ema.items() if k != "images"}
        run_log.evaluation(step, {f"val_{k}": v for k, v in result.items() if not k.endswith("per_s")})
        run_log.scalars(step, {f"val/{k}": v for k, v in result.items() if k != "images"})
        top1 = result.get("ema_top1", result["top1"])
        if top1 > best["top1"] and (saved is None or not parallel.is_main or checkpoints.mark_best(saved)):
            best = {"top1": top1, "step": step}
        and_ema = f"  of the EMA {result['ema_top1']:.2f} %" if ema_net is not None else ""
        log.info("step %d  val top-1 %.2f %%%s  loss %.4f", step, result["top1"], and_ema, result["loss"])

    def samples_of_step(number: int, rank: int) -> str:
        epoch, index = divmod(number - 1, steps_per_epoch)
        batches = range(index * accum, (index + 1) * accum)
        ranks = range(parallel.world) if parallel.one_program else [rank]
        ids = [i for r in ranks for b in batches for i in train.sample_ids(epoch, b, r)]
        return ", ".join(train.describe(ids[:8])) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")

    def last_good() -> str:
        checkpoints.wait()
        newest = next(iter(checkpoints.paths()), None)
        return f"The last good checkpoint is {newest}." if newest else "There is no checkpoint yet."

    # ------------------------------------------------------------------ loop
    stop = StopRequest()
    cleanup.callback(stop.release)
    profiler = start_profiler(run_dir, cfg.trainer.warmup_steps, total_steps - step) if cfg.trainer.profile else None
    profiled = 0 if profiler is None else PROFILED_STEPS
    # fp16's scaler asks the device at each step of an optimizer that cannot itself leave out one that overflowed.
    waits = scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False)
    timer = StepTimer(runtime, cfg.trainer.warmup_steps + profiled, waits)
    history = History(parallel)
    flops_per_step = facts.train_flops_per_image * images_per_step / parallel.devices  # of each device
    saves = cfg.checkpoints.every_epochs or cfg.checkpoints.every_steps
    stopping = False
    parameters = [p for p in model.parameters() if p.requires_grad]
    first_step, settled, untrained, named_host = step, step + SETTLING_STEPS, [], False
    cleanup.callback(gc.unfreeze)
    if eval_pending:  # the run was ended between this step's checkpoint and its evaluation
        evaluate_now(path)
    net.train()
    timer.start()
    while step < total_steps and not stopping:
        epoch, first = divmod(step, steps_per_epoch)
        with contextlib.closing(parallel.feed(train.epoch(epoch, start=first * accum))) as batches:
            for index in range(first, steps_per_epoch):
                # One optimizer step. Nothing in it waits for the device.
                losses = []
                for batch in range(accum):
                    with timer.waiting():
                        images, targets = next(batches)
                    with parallel.accumulating(net, last=batch == accum - 1):
                        with runtime.autocast():
                            logits = net(images)
                        loss = loss_of(logits.float(), targets)
                        timer.forward_done()
                        scaler.scale(loss / accum).backward()
                    losses.append(loss.detach())
                if step == first_step:
                    untrained = parameters_without_gradient(model)
                scaler.unscale_(optimizer)
                grad_norm = parallel.clip_gradients(parameters, cfg.trainer.clip_grad, optimizer)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                lr = optimizer.param_groups[-1]["lr"]
                step += 1
                scheduler.step_update(step)
                if ema is not None:
                    parallel.update_ema(ema, model, step)
                history.add(step, sum(losses) / accum, grad_norm, lr)
                runtime.end_step(images, targets)
                timer.step_done()
                if step == settled:
                    # A later collection need not go over this: it would take 0.3 s, and ranks would wait.
                    gc.collect()
                    gc.freeze()
                if profiler is not None:
                    profiler.step()

                # Boundaries: here, and only here, the device is waited for.
                done = step == total_steps
                stopping = parallel.agree(bool(stop)) and not done
                epoch_done = index == steps_per_epoch - 1
                eval_due = due(cfg.trainer.eval_every, epoch + 1, epoch_done, done)
                save_due = (
                    stopping
                    or (eval_due and saves)
                    or due(cfg.checkpoints.every_epochs, epoch + 1, epoch_done, done)
                    or due(cfg.checkpoints.every_steps, step)
                )
                if not (done or eval_due or save_due or due(cfg.trainer.log_every, step)):
                    continue
                window = timer.stop()
                records = history.read()
                run_log.steps(records)
                name_straggler(parallel, step, window)
                check_finite(records, samples_of_step, last_good, gradients=not scaler.is_enabled())
                named_host = named_host or name_late_host(step, window)
                recent_losses.extend(r.loss for r in records)
                log_window(run_log, parallel, epoch, records, window, images_per_step, flops_per_step)
                # The checkpoint comes first: an evaluation can take longer than a preempted machine has left.
                saved = save() if save_due else None
                if eval_due and not stopping:
                    evaluate_now(saved)
                if done or stopping:
                    break
                timer.start()
    if profiler is not None:
        profiler.stop()
    checkpoints.wait()

    # ------------------------------------------------------------------ summary
    if stopping:
        by = ", ".join(sorted({name for name in parallel.gather(stop.signal and stop.signal.name) if name}))
        log.warning("stopped by %s at step %d of %d; resume=auto goes on from here", by, step, total_steps)
        sys.exit(EXIT_INTERRUPTED)
    timing = timer.summary()
    mean_ms = timing["step_time_ms"]["mean"]
    train_loss = sum(recent_losses) / len(recent_losses) if recent_losses else None
    summary = {
        "status": "done",
        "model": cfg.model.name,
        "attn": attn,
        "ops": cfg.ops.name,
        "quant": cfg.quant.name,
        "runtime": runtime.name,
        "precision": runtime.precision,
        "compile": compile_mode or compiled,
        "device": runtime.device_name,
        "parallel": parallel.name,
        "devices": parallel.devices,
        "data": cfg.data["_target_"].split(".")[-2],
        "batch_size": images_per_step,
        **timing,
        "images_per_s": None if mean_ms is None else round(images_per_step / mean_ms * 1e3, 2),
        "mfu": mfu(runtime, flops_per_step, mean_ms),
        "train_flops_per_step": flops_per_step * parallel.devices,
        "peak_memory_bytes": runtime.peak_memory_bytes(),
        "train_loss": train_loss,
        "parameters_without_gradient": len(untrained),
        "val_top1": result.get("top1"),
        "val_top5": result.get("top5"),
        "val_ema_top1": result.get("ema_top1"),
        "best": best if best["step"] else None,
        "epochs": round(step / steps_per_epoch, 4),
        "steps": step,
        "seed": cfg.seed,
        "seconds": round(time.time() - begin, 1),
        "versions": versions(),
        "git_commit": git_commit(),
    }
    for name, weights in (("model", model), ("model_ema", None if ema is None else ema.module)):
        if weights is not None:
            exported, file = parallel.full_state_dict(weights), run_dir / f"{name}.safetensors"
            try:
                parallel.on_main(ckpt.export_safetensors, exported, file, learned)
            except OSError as error:
                mend = "resume=auto goes on from there once it can be written"
                raise UsageError(f"the weights cannot be written to {file}: {error}. {last_good()} {mend}") from error
    run_log.hparams(
        {"attn": attn, "ops": cfg.ops.name, "model": cfg.model.name, "lr": cfg.optim.lr, "batch_size": images_per_step},
        {"step_ms": timing["step_time_ms"]["median"], "loss": train_loss, "val_top1": summary["val_top1"]},
    )
    parallel.on_main(run_folder.write_json, run_dir / "summary.json", summary)
    report(summary, run_dir)


def due(every: int | None, count: int, complete: bool = True, at_the_end: bool = False) -> bool:
    """Whether something done every so many steps or epochs is due when `count` of them are complete, or at the end."""
    return bool(every) and (at_the_end or (complete and count % every == 0))


# ---------------------------------------------------------------------- command line


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> float | None:
    if job.is_sweep_job():
        return job.run_job(cfg)
    try:
        run(cfg, Path(HydraConfig.get().runtime.output_dir))
    except (UsageError, NonFiniteLossError, BadImagesError, WorkerDiedError) as error:
        log.error("error: %s", error)
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except Exception:
        log.exception("the run ended with an error of the program")
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(command_line.run(main, str(Path(__file__).parent / "conf")))
