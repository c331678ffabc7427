"""The speed run: seconds of training until a model classifies the held-out shapes of vitkernels.data.shapes.

The clock runs while training steps run. It stops for evaluations, and starts after an untimed warm-up, which compiles
and is undone. Images, classes, held-out set and target are fixed; model, optimizer, kernels and precision are free.
"""

import copy
import gc
import json
import logging
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import torch
from timm.utils import random_seed
from torch import Tensor

from vitkernels import parallel, runtime
from vitkernels.bridge import interpreted
from vitkernels.config import Config
from vitkernels.config.compose import compose
from vitkernels.data.device_transforms import finished
from vitkernels.errors import UsageError
from vitkernels.provenance import git_commit, versions
from vitkernels.training import setup
from vitkernels.training.evaluate import evaluate
from vitkernels.training.trainer import Trainer

log = logging.getLogger("vitkernels")

TARGET = 95.0  # top-1 in percent
_DATA = "vitkernels.data.shapes.build"
_WARMUP_STEPS = 5


@dataclass(frozen=True)
class Attempt:
    """One training run. seconds: until the evaluation with `top1`. reached: whether that is the target or above."""

    seed: int
    seconds: float
    steps: int
    top1: float
    reached: bool


def measure(overrides: Sequence[str], seeds: Sequence[int], target: float = TARGET, eval_every: int = 100) -> dict:
    """Train once per seed until the target is reached, and return the row for results/speedrun.jsonl.

    Args:
        overrides: settings in addition to experiment=speedrun.
        target: top-1 accuracy in percent. eval_every: steps between evaluations.

    Raises:
        UsageError: "speedrun.task" if the settings change the data set or the held-out images.
    """
    words = ["experiment=speedrun", *overrides]
    cfg = compose(words)
    _check_task(cfg)
    device = runtime.create(cfg.runtime.name, cfg.runtime.precision)
    attempts = [attempt(compose([*words, f"seed={seed}"]), device, target, eval_every) for seed in seeds]
    image_size = cfg.model.img_size
    return {
        "image_size": image_size, "target": target, "val_items": cfg.data.options["val_items"],
        "reached": all(each.reached for each in attempts), "attempts": [vars(each) for each in attempts],
        "mean_seconds": sum(each.seconds for each in attempts) / len(attempts),
        "images_per_step": cfg.data.batch_size * cfg.trainer.accum_steps, "model": cfg.model.name,
        "device": device.describe(), "precision": device.precision, "settings": list(overrides),
        "eval_every": eval_every, "interpreted": sorted(interpreted.used()), "date": time.strftime("%Y-%m-%d"),
        "commit": git_commit(), "versions": versions(),
    }  # fmt: skip


def _check_task(cfg: Config) -> None:
    if cfg.data.target != _DATA or cfg.model.img_size is None:
        raise UsageError(
            f"the speed run's task is data=shapes at a fixed model.img_size; got data._target_={cfg.data.target} and "
            f"model.img_size={cfg.model.img_size}",
            code="speedrun.task",
        )


def attempt(cfg: Config, device: runtime.Runtime, target: float, eval_every: int) -> Attempt:
    """Train until an evaluation reaches the target, or to the end of the run."""
    gc.collect()
    with parallel.create("none", device) as strategy:
        trainer, _ = setup.trainer_from_config(cfg, strategy)
        seconds = _undone_warmup(trainer, cfg.seed)
        log.info("seed %d: warm-up of %.1f s, not counted", cfg.seed, seconds)
        return _train(trainer, cfg.seed, target, eval_every)


def _undone_warmup(trainer: Trainer, seed: int) -> float:
    """Train a few steps and evaluate, so that everything is compiled; restore model and optimizer; return the
    seconds.
    """
    begin = time.perf_counter()
    modules = [trainer.model, *([] if trainer.ema is None else [trainer.ema])]
    before = [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]
    optimizer = copy.deepcopy(trainer.optimizer.state_dict())  # its groups may hold counters, such as LAMB's step
    with closing(_batches(trainer)) as batches:
        for _ in range(_WARMUP_STEPS):
            trainer.train_step(batches)
    _top1(trainer)
    with torch.no_grad():
        for module, state in zip(modules, before, strict=True):
            module.load_state_dict(state)  # in place: CUDA graphs keep the parameters' addresses
    trainer.optimizer.load_state_dict(optimizer)
    trainer.scaler = trainer.parallel.runtime.grad_scaler()
    trainer.metrics.read()
    trainer.state.step = 0
    trainer.scheduler.step_update(0)
    random_seed(seed)
    return time.perf_counter() - begin


def _train(trainer: Trainer, seed: int, target: float, eval_every: int) -> Attempt:
    seconds, plan, device = 0.0, trainer.plan, trainer.parallel.runtime
    trainer.net.train()
    with closing(_batches(trainer)) as batches:
        while True:
            device.synchronize()
            begin = time.perf_counter()
            for _ in range(min(eval_every, plan.total_steps - trainer.state.step)):
                trainer.train_step(batches)
            device.synchronize()
            seconds += time.perf_counter() - begin
            trainer.metrics.read()
            step, top1 = trainer.state.step, _top1(trainer)
            log.info("seed %d  step %d  %.1f s  top-1 %.2f %%", seed, step, seconds, top1)
            if top1 >= target or step == plan.total_steps:
                return Attempt(seed, round(seconds, 3), step, round(top1, 3), top1 >= target)


def _top1(trainer: Trainer) -> float:
    """Return the held-out accuracy of the averaged weights, if there are any, else of the weights."""
    net, kind = (trainer.net, "eval") if trainer.ema_net is None else (trainer.ema_net, "EMA eval")
    return evaluate(net, trainer.data.val, trainer.parallel, kind)["top1"]


def _batches(trainer: Trainer) -> Generator[tuple[Tensor, Tensor]]:
    """Yield device batches of all epochs from the first on."""
    train = trainer.data.train
    assert train is not None
    epoch = 0
    while True:
        yield from finished(train, trainer.parallel.feed(train.epoch(epoch)))
        epoch += 1


def append(row: dict, path: Path) -> None:
    """Add a row to a results file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        file.write(json.dumps(row) + "\n")
