"""Train or evaluate a vision transformer: `python train.py --help`.

A run joins the processes, claims its folder, builds data, model and optimizer, resumes, fits and finishes. Its parts
are in vitkernels.training; each works without this file.
"""

import gc
import os

if __name__ == "__main__":
    from vitkernels.cli.early_stop import end_at_signals

    end_at_signals()  # the imports below take seconds; training handles these signals itself
    # Imports and compilation create a million objects that stay. If they were searched for garbage after every 700, as
    # by default, that would take 1 s of each start.
    gc.set_threshold(10_000)

# Set before torch loads. Idle OpenMP threads that spin for long slow training tenfold if processes share cores; idle
# threads that sleep immediately slow it threefold if they do not.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")

import contextlib
import logging
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from timm.utils import random_seed

from vitkernels import parallel as strategies
from vitkernels import runtime as runtimes
from vitkernels.cli import command_line
from vitkernels.cli.exit_status import errors_as_exit_status
from vitkernels.config import Config, check_precision, from_run
from vitkernels.parallel import Parallel
from vitkernels.runtime import Runtime
from vitkernels.sweep import job
from vitkernels.training import out_of_memory, run_dir, setup, signals
from vitkernels.training.evaluation_run import evaluate_checkpoint
from vitkernels.training.plan import Due
from vitkernels.training.result import finish
from vitkernels.training.resume import resume_or_begin
from vitkernels.training.signals import EXIT_INTERRUPTED, StopRequest

log = logging.getLogger("vitkernels")


def run(config: DictConfig, folder: Path, create_runtime: Callable[[str, str], Runtime] = runtimes.create) -> None:
    """Train or evaluate as `config` says, with results in `folder`, on the runtime that `create_runtime` makes."""
    cfg = Config.from_hydra(config)
    with run_dir.FailureRecord(folder, strategies.is_main(cfg.runtime.name)) as failure:
        runtime = create_runtime(cfg.runtime.name, cfg.runtime.precision)
        check_precision(cfg, runtime.precision)
        options = vars(cfg.parallel)
        with strategies.create(runtime=runtime, accum_steps=cfg.trainer.accum_steps, **options) as parallel:
            is_eval = cfg.mode == "eval"
            with out_of_memory.explained(runtime, cfg.data.batch_size, cfg.trainer.accum_steps, not is_eval):
                if is_eval:
                    failure.owned = True
                    evaluate_checkpoint(cfg, parallel, folder)
                else:
                    train(cfg, parallel, folder, failure)


def train(cfg: Config, parallel: Parallel, folder: Path, failure: run_dir.FailureRecord) -> None:
    begin = time.monotonic()
    with contextlib.ExitStack() as cleanup:
        # ------------------------------------------------------------------ the run's folder
        parallel.on_main(cleanup.enter_context, run_dir.locked(folder))
        folder, complete = parallel.on_main(run_dir.claim, folder, cfg.to_dict())
        failure.owned = True
        if complete:
            log.info("run already complete; results in %s", folder / "summary.json")
            return

        # ------------------------------------------------------------------ data, model, optimizer
        random_seed(cfg.seed)
        setup.log_runtime(cfg, parallel)
        trained_on = setup.read_source(cfg, parallel)
        data = setup.build_data(cfg, parallel, trained_on)
        parts = setup.build_model(cfg, parallel, data, trained_on)
        plan = setup.build_plan(cfg, parallel, data)
        optimization = setup.build_optimizer(cfg, parallel, parts.model, plan)
        trainer = setup.build_trainer(cfg, parallel, data, parts, plan, optimization)

        # ------------------------------------------------------------------ resume, fit, finish
        stop = cleanup.enter_context(StopRequest())
        cleanup.callback(lambda: trainer.logger.close())
        if not resume_or_begin(cfg, trainer, folder, setup.notes_of(cfg, data), begin):
            log.info("run already complete; results in %s", folder / "summary.json")
            return
        due = trainer.fit(stop, folder if cfg.trainer.profile else None)
        if Due.STOP in due:
            by = ", ".join(sorted({name for name in parallel.gather(stop.signal and stop.signal.name) if name}))
            step, steps = trainer.state.step, plan.total_steps
            log.warning("stopped by %s at step %d of %d; resume=auto continues from here", by, step, steps)
            sys.exit(EXIT_INTERRUPTED)
        finish(cfg, trainer, parts, folder)


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config: DictConfig) -> float | list[float] | None:
    if job.is_sweep_job():
        return job.run_job(config)
    with errors_as_exit_status():
        run(from_run(config, HydraConfig.get().overrides.task), Path(HydraConfig.get().runtime.output_dir))
    signals.ignore_stops()  # the results are complete, and so is the exit status
    return None


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on, Ctrl-C is an exception that is handled
    sys.exit(command_line.run(main, str(Path(__file__).parent / "conf")))
