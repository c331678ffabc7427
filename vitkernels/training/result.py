"""Write the results of a complete run: exported weights and summary.json."""

import logging
import time
from pathlib import Path

from vitkernels.bridge import interpreted
from vitkernels.checkpoint.export import export_safetensors
from vitkernels.config import Config
from vitkernels.errors import UsageError
from vitkernels.files import write_json
from vitkernels.inference import open_trained, timm_folder
from vitkernels.inference.timm_folder import write_timm_folder
from vitkernels.provenance import git_commit, versions
from vitkernels.training.disk_space import report_unwritten
from vitkernels.training.evaluation_files import write_findings
from vitkernels.training.setup import ModelParts, compile_mode
from vitkernels.training.summary import log_summary, mfu
from vitkernels.training.trainer import Trainer

log = logging.getLogger("vitkernels")


def finish(cfg: Config, trainer: Trainer, parts: ModelParts, folder: Path) -> dict:
    """Export the weights, write summary.json and log the run's figures; return the summary."""
    summary = run_summary(cfg, trainer, parts)
    export_weights(trainer, folder)
    parameters = {name: summary[name] for name in ("attn", "ops", "model")}
    parameters |= {"lr": cfg.optim.lr, "batch_size": summary["batch_size"], "weight_decay": cfg.optim.weight_decay}
    parameters |= {"seed": cfg.seed, "epochs": summary["epochs"]}
    results = {"step_ms": summary["step_time_ms"]["median"], "loss": summary["train_loss"]}
    trainer.logger.hparams(parameters, results | {"val_top1": summary["val_top1"]})
    if trainer.answers is not None:
        trainer.parallel.on_main(_write_findings, trainer, folder)
    trainer.parallel.on_main(write_json, folder / "summary.json", summary)
    trainer.parallel.on_main(export_folder, folder, summary["best"] is not None)
    log_summary(summary, folder, trainer.data.num_classes)
    report_unwritten(trainer)
    return summary


def export_weights(trainer: Trainer, folder: Path) -> None:
    """Write model.safetensors, and model_ema.safetensors if there is an EMA; all processes must call it."""
    for name, weights in (("model", trainer.model), ("model_ema", trainer.ema and trainer.ema.module)):
        if weights is None:
            continue
        exported, file = trainer.parallel.full_state_dict(weights), folder / f"{name}.safetensors"
        try:
            trainer.parallel.on_main(_export, trainer, exported, file)
        except OSError as error:
            last = trainer.describe_last_checkpoint()
            raise UsageError(
                f"the weights cannot be written to {file}: {error.strerror or error}. {last} Free some space or make "
                "the folder writable; resume=auto then writes them, from the last checkpoint if there is one",
                code="run.export_failed",
            ) from error


def _export(trainer: Trainer, weights: dict, file: Path) -> None:
    """Write the weights; if the disk is full, checkpoints other than the newest and the best make room."""
    try:
        export_safetensors(weights, file, trainer.notes)
    except OSError:
        if trainer.checkpoints is None or not trainer.checkpoints.remove_older():
            raise
        export_safetensors(weights, file, trainer.notes)


def export_folder(run: Path, evaluated: bool) -> None:
    """Write RUN/export in timm's layout, with the best weights, or the last if the run was never evaluated.

    A full disk is logged: the run is complete without the folder.
    """
    try:
        write_timm_folder(open_trained(run, "best" if evaluated else "last"), run / timm_folder.NAME)
    except OSError as error:
        path = run / timm_folder.NAME
        log.error("could not write %s: %s; `vitkernels export %s --format timm` writes it again", path, error, run)


def _write_findings(trainer: Trainer, folder: Path) -> None:
    """Write and log per-class figures and pictures of the last evaluation; a full disk only leaves them out."""
    assert trainer.answers is not None
    try:
        for name, path in write_findings(trainer.answers, trainer.data, folder).items():
            trainer.logger.picture(trainer.state.step, f"evaluation/{name}", path)
    except OSError as error:
        log.error("could not write the pictures of the evaluation: %s; `vitkernels eval %s` makes them", error, folder)


def _best(trainer: Trainer) -> dict | None:
    """Return the figures of the best evaluation and the name of its weights; None before the first one."""
    if not trainer.state.best["step"] or trainer.best_weights is None:
        return None
    return {**trainer.state.best, "weights": trainer.best_weights.path(trainer.ema is not None).name}


def run_summary(cfg: Config, trainer: Trainer, parts: ModelParts) -> dict:
    """Return the content of a complete run's summary.json."""
    plan, state, parallel = trainer.plan, trainer.state, trainer.parallel
    runtime = parallel.runtime
    timing = trainer.timer.summary()
    mean_ms = timing["step_time_ms"]["mean"]
    compiled, mode = compile_mode(cfg, parallel)
    return {
        "status": "done",
        "model": cfg.model.name,
        "attn": parts.attn,
        "ops": cfg.ops.name,
        "quant": cfg.quant.name,
        "runtime": runtime.name,
        "precision": runtime.precision,
        "compile": mode or compiled,
        "device": runtime.device_name,
        "parallel": parallel.name,
        "devices": parallel.devices,
        "data": cfg.data.target.split(".")[-2],
        "batch_size": plan.images_per_step,
        **timing,
        "images_per_s": None if mean_ms is None else round(plan.images_per_step / mean_ms * 1e3, 2),
        "mfu": mfu(runtime, trainer.flops_per_step, mean_ms),
        "train_flops_per_step": trainer.flops_per_step * parallel.devices,
        "interpreted": interpreted.used(),
        "machine": trainer.machine,
        "peak_memory_bytes": runtime.peak_memory_bytes(),
        "train_loss": state.mean_recent_loss,
        "parameters_without_gradient": len(trainer.parameters_without_gradient or ()),
        "val_loss": state.last_eval.get("loss"),
        "val_top1": state.last_eval.get("top1"),
        **({"val_map": state.last_eval["map"]} if "map" in state.last_eval else {}),
        "val_top5": state.last_eval.get("top5"),
        "val_ema_top1": state.last_eval.get("ema_top1"),
        "best": _best(trainer),
        "epochs": round(state.step / plan.steps_per_epoch, 4),
        "steps": state.step,
        "seed": cfg.seed,
        "first_step_s": None if trainer.first_step_s is None else round(trainer.first_step_s, 2),
        "seconds": round(time.monotonic() - trainer.begin, 1),
        "versions": versions(),
        "git_commit": git_commit(),
    }
