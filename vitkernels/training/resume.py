"""Start or resume a run in its folder."""

import json
import logging
import sys
from pathlib import Path

import yaml

from vitkernels.checkpoint.checkpoints import Checkpoints, load_state
from vitkernels.checkpoint.trained_on import read_trained_on
from vitkernels.config import Config
from vitkernels.provenance import git_commit, versions
from vitkernels.training import run_dir, setup, source
from vitkernels.training.disk_space import check_space
from vitkernels.training.loggers import MetricLogger, NullLogger, remote, run_loggers
from vitkernels.training.trainer import Trainer

log = logging.getLogger("vitkernels")


def resume_or_begin(cfg: Config, trainer: Trainer, folder: Path, notes: dict, begin: float) -> bool:
    """Load the checkpoint that `resume` selects, if any, and record the run in its folder.

    The folder changes only after all checks have passed. Return False if the run is already complete.

    Args:
        notes: class names and preprocessing, kept in each checkpoint and in the run's folder.
        begin: time.monotonic() when the process started.
    """
    parallel, plan, settings, data = trainer.parallel, trainer.plan, cfg.to_dict(), trainer.data
    checkpoints = Checkpoints(folder / "checkpoints", cfg.checkpoints.keep, parallel.checkpoint_group, parallel.writes)
    identity = {
        "model_name": cfg.model.name,
        "model_arguments": setup.model_arguments(cfg),
        "seed": cfg.seed,
        "images_per_step": plan.images_per_step,
        "steps_per_epoch": plan.steps_per_epoch,
        "optimizer_name": cfg.optim.opt,
        "has_ema": trainer.ema is not None,
    }
    trainer.attach(checkpoints, identity, notes, begin)
    parallel.on_main(checkpoints.remove_leftovers)
    path = parallel.on_main(run_dir.find_checkpoint, folder, settings, checkpoints)
    if path is not None:
        state = parallel.load(load_state, path)
        run_dir.check_same_run(path, state, identity, plan.total_steps)
        trained_on = parallel.load(read_trained_on, path)
        parallel.on_main(source.check_data, path, trained_on, data.class_names, data.preprocessing)
        at_end = state["step"] == plan.total_steps
        if at_end and parallel.on_main(run_dir.restore_summary, folder, settings, plan.total_steps):
            return False
        trainer.resume(path)
        if folder.resolve() in path.resolve().parents and not (folder / "metrics.jsonl").exists():
            log.warning("%s/metrics.jsonl is missing: it will lack the steps up to %d", folder, state["step"])
    saves = bool(cfg.checkpoints.every_epochs or cfg.checkpoints.every_steps)
    parallel.on_main(check_space, trainer, folder, saves, cfg.trainer.eval_every is not None)
    parallel.on_main(run_dir.begin, folder, settings, path is not None, notes)
    if path is None and trainer.best_weights is not None:
        parallel.on_main(trainer.best_weights.remove)  # of an attempt that left no checkpoint
    trainer.logger = _loggers(cfg, trainer, folder)
    if trainer.state.eval_pending:  # the run was stopped between this step's checkpoint and its evaluation
        trainer.evaluate(path)
    return True


def _loggers(cfg: Config, trainer: Trainer, folder: Path) -> MetricLogger:
    """Return the run's loggers, with its settings logged as text; all processes but the main one log nothing."""
    if not trainer.parallel.is_main:
        return NullLogger()
    state = trainer.state
    further = remote.create(cfg.logger.name, folder, cfg.logger.project, cfg.to_dict())
    logger = run_loggers(folder, trainer.plan.total_steps, state.step, state.eval_pending, further)
    provenance = {"command": " ".join(sys.argv), "versions": versions(), "git commit": git_commit()}
    settings = yaml.safe_dump(cfg.to_dict(), sort_keys=False)
    logger.text("run", f"```yaml\n{settings}\n```\n```json\n{json.dumps(provenance, indent=1)}\n```")
    return logger
