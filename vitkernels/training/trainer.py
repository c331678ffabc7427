"""The training loop: launch steps without waiting for the device, and wait for it only at boundaries."""

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from timm.scheduler.scheduler import Scheduler
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from vitkernels.checkpoint import optimizer_state
from vitkernels.checkpoint.checkpoints import Checkpoints, folder_name, load_state, load_tensors, prefixed
from vitkernels.checkpoint.random_state import random_state, set_random_state
from vitkernels.data import Batch, Data
from vitkernels.data.contract import RawBatch
from vitkernels.data.device_transforms import finish
from vitkernels.models import load_weights
from vitkernels.parallel import Parallel
from vitkernels.runtime.machine import MachineWatch
from vitkernels.training.answers import Answers, BatchAnswers, collect
from vitkernels.training.best_weights import BestWeights, is_better
from vitkernels.training.distillation import Distillation
from vitkernels.training.evaluate import NoImagesError, evaluate
from vitkernels.training.health import (
    check_finite,
    parameters_without_gradient,
    warn_if_host_bound,
    warn_if_input_bound,
    warn_of_straggler,
)
from vitkernels.training.loggers import MetricLogger, NullLogger
from vitkernels.training.loss import Loss
from vitkernels.training.metrics import StepMetrics, add_times
from vitkernels.training.plan import Due, StepPlan
from vitkernels.training.profiler import PROFILED_STEPS, start_profiler
from vitkernels.training.signals import StopRequest
from vitkernels.training.state import TrainState
from vitkernels.training.step_timer import StepTimer
from vitkernels.training.summary import log_window

log = logging.getLogger("vitkernels")

SETTLING_STEPS = 4  # by then, all objects that live as long as the run exist


@contextlib.contextmanager
def _ended_by(end: Callable[[], None]) -> Iterator[None]:
    """Call `end` after the block. If the block raises an error, an error of `end` is logged and does not replace it."""
    try:
        yield
    except BaseException:
        try:
            end()
        except Exception as error:
            log.error("%s, after the error that ended training", error)
        raise
    end()


class Trainer:
    """Train `model` by calling `net`, which wraps the same parameters.

    vitkernels.training.setup builds it. By itself it saves and logs nothing: `attach` adds checkpoints,
    and `logger` can be replaced.

    Args:
        parallel: the strategy that connects this process to the others.
        plan: which batches each step takes, and what is due after it.
        data: the loaders; only `fit` and evaluations use them.
        model, net: the model with timm's parameter names, and the wrapped module to call.
        optimizer, scheduler, scaler: the scheduler counts steps; the scaler does nothing except in fp16.
        loss_fn: called with float32 logits (B, K) and targets.
        distillation: the loss with a teacher, in place of loss_fn; None has no teacher.
        ema, ema_net: the averaged weights and the wrapped module to call, or None.
        clip_grad: largest gradient norm; None does not clip.
        cuda_graphs: whether `net` replays CUDA graphs, whose next replay overwrites gradients that are not copied.
        untimed_steps: first steps of the process that are not timed.
        flops_per_image: model FLOPs of one image, forward and backward.
    """

    def __init__(
        self,
        parallel: Parallel,
        plan: StepPlan,
        data: Data,
        model: nn.Module,
        net: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Scheduler,
        scaler: torch.amp.GradScaler,
        loss_fn: Loss,
        *,
        distillation: Distillation | None = None,
        ema: ModelEmaV3 | None = None,
        ema_net: nn.Module | None = None,
        clip_grad: float | None = None,
        cuda_graphs: bool = False,
        untimed_steps: int = 0,
        flops_per_image: float = 0.0,
    ):
        self.parallel, self.plan, self.data = parallel, plan, data
        self.model, self.net, self.ema, self.ema_net = model, net, ema, ema_net
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.loss_fn, self.distillation = loss_fn, distillation
        self.clip_grad, self.untimed_steps, self.cuda_graphs = clip_grad, untimed_steps, cuda_graphs
        self.flops_per_step = flops_per_image * plan.images_per_step / parallel.devices  # on each device
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.parameters_without_gradient: list[str] | None = None  # known after the first step
        self.state = TrainState()
        self.metrics = StepMetrics(parallel)
        # The fp16 scaler waits for the device in each step, unless the optimizer itself skips overflows.
        waits = scaler.is_enabled() and not getattr(optimizer, "_step_supports_amp_scaling", False)
        self.timer = StepTimer(parallel.runtime, untimed_steps, waits)
        scheduler.step_update(0)
        self.logger: MetricLogger = NullLogger()
        self.checkpoints: Checkpoints | None = None
        self.best_weights: BestWeights | None = None
        self.identity: dict = {}
        self.notes: dict = {}
        # Predictions of the evaluation after the last step, by the EMA if there is one.
        self.answers: Answers | None = None
        self.machine: dict | None = None  # other load on the machine during `fit`, see MachineWatch.lap
        self.begin = time.monotonic()
        self.first_step_s: float | None = None  # from `begin` to the end of the first step on the host, which compiles
        self._host_bound = self._input_bound = False  # whether the log has warned

    def attach(self, checkpoints: Checkpoints, identity: dict, notes: dict, begin: float) -> None:
        """Attach the checkpoints of a run.

        Args:
            identity: the entries that a checkpoint must share with this run to be resumed.
            notes: class names and preprocessing, kept in each checkpoint.
            begin: time.monotonic() when the run started.
        """
        self.checkpoints, self.identity, self.notes, self.begin = checkpoints, identity, notes, begin
        self.best_weights = BestWeights(checkpoints.folder.parent, checkpoints, notes)

    # ---- the loop ----

    def fit(self, stop: StopRequest | bool = False, profile_into: Path | None = None) -> Due:
        """Train to the end of the plan, or to the end of the step in which `stop` becomes true.

        Return the boundary that ended training, with Due.END or Due.STOP. profile_into: folder for a trace of a few
        steps, None for none.
        """
        left = self.plan.total_steps - self.state.step
        profiler = None if profile_into is None else start_profiler(profile_into, self.untimed_steps, left)
        if profiler:
            self.timer.warmup_left += PROFILED_STEPS
        # Other ranks on this host would count as other load.
        watch = MachineWatch() if self.parallel.world == 1 else None
        with contextlib.ExitStack() as cleanup:
            cleanup.callback(gc.unfreeze)
            if self.checkpoints:
                cleanup.enter_context(_ended_by(self.checkpoints.wait))
            if profiler:
                cleanup.enter_context(_ended_by(profiler.stop))
            due = self._steps(stop, profiler)
            self.machine = None if watch is None else watch.lap()
        return due

    def _steps(self, stop: StopRequest | bool, profiler: torch.profiler.profile | None) -> Due:
        due, settled = Due.NONE, self.state.step + SETTLING_STEPS
        self.net.train()
        self.timer.start()
        while self.state.step < self.plan.total_steps and not due & (Due.STOP | Due.END):
            # One feed per epoch: a feed of all epochs would prefetch training batches across the evaluation.
            assert self.data.train is not None
            batches = self.parallel.feed(self.plan.batches(self.data.train, self.state.step))
            with contextlib.closing(batches):
                for _ in range(self.plan.steps_left_in_epoch(self.state.step)):
                    self.train_step(batches)
                    if self.state.step == settled:
                        # Later collections skip what exists now: scanning it takes 0.3 s, and other ranks would wait.
                        gc.collect()
                        gc.freeze()
                    if profiler:
                        profiler.step()
                    due = self.plan.due(self.state.step, stopping=self.parallel.agree(bool(stop)))
                    if due:
                        self._boundary(due)
                    if due & (Due.STOP | Due.END):
                        break
        return due

    def train_step(self, batches: Iterator[Batch | RawBatch]) -> None:
        """Take one optimizer step on the next `plan.accum_steps` batches. It never waits for the device.

        Args:
            batches: the training loader's batches on this process's devices, such as `parallel.feed` gives.
        """
        assert self.data.train is not None
        parallel, scaler, optimizer, accum = self.parallel, self.scaler, self.optimizer, self.plan.accum_steps
        losses: list[Tensor] = []
        for number in range(accum):
            with self.timer.waiting():
                batch = next(batches)
            images, targets = finish(self.data.train, batch)
            with parallel.accumulating(self.net, last=number == accum - 1):
                with parallel.runtime.autocast():
                    outputs = self.net(images)
                    teacher_logits = None if self.distillation is None else self.distillation.teacher(images)
                if self.distillation is None or teacher_logits is None:
                    loss = self.loss_fn(outputs.float(), targets)
                else:
                    loss = self.distillation(outputs, targets, teacher_logits)
                self.timer.forward_done()
                scaler.scale(loss / accum).backward()
            losses.append(loss.detach())
            if self.cuda_graphs and number == 0 and accum > 1:
                self._copy_gradients()
        if self.parameters_without_gradient is None:
            self.parameters_without_gradient = parameters_without_gradient(self.model)
        scaler.unscale_(optimizer)
        grad_norm = parallel.clip_gradients(self.parameters, self.clip_grad, optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        lr = optimizer.param_groups[-1]["lr"]
        self.state.step += 1
        self.scheduler.step_update(self.state.step)
        if self.ema is not None:
            parallel.update_ema(self.ema, self.model, self.state.step)
        self.metrics.add(self.state.step, sum(losses[1:], losses[0]) / accum, grad_norm, lr)
        parallel.runtime.end_step(images, targets)
        if self.first_step_s is None:
            self.first_step_s = time.monotonic() - self.begin
        self.timer.step_done()

    def _copy_gradients(self) -> None:
        """Move the gradients out of the CUDA graphs' memory, so that those of later batches are added to them."""
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()

    def _boundary(self, due: Due) -> None:
        """Wait for the device, then read, check, log, save and evaluate."""
        window = self.timer.stop()
        records = self.metrics.read()
        add_times(records, window.step_ms)
        step = self.state.step
        self.logger.steps(records)
        warn_of_straggler(self.parallel, step, window)
        check_finite(records, self._describe_samples, self.describe_last_checkpoint, not self.scaler.is_enabled())
        graphs_would_help = not self.cuda_graphs and self.parallel.no_cuda_graphs() is None
        self._host_bound = self._host_bound or warn_if_host_bound(step, window, graphs_would_help)
        if not self._input_bound:
            self._input_bound = warn_if_input_bound(step, window, self.data.train)
        self.state.recent_losses.extend(record.loss for record in records)
        log_window(self.logger, self.parallel, self.plan, records, window, self.flops_per_step)
        # Save before evaluating: an evaluation can take longer than a preempted machine has left.
        self.state.eval_pending = Due.EVAL in due
        saved = self.save() if Due.SAVE in due and self.checkpoints else None
        if Due.EVAL in due and Due.STOP not in due:
            self.evaluate(saved)
        if not due & (Due.STOP | Due.END):
            self.timer.start()

    # ---- evaluation ----

    def evaluate(self, saved: Path | None = None) -> None:
        """Evaluate the model and its EMA, log the figures, and keep `saved` if its weights are the best so far.

        Without a readable image there are no figures: that is logged, and training continues.
        """
        step, state = self.state.step, self.state
        # A data set without class names, such as random images, has no mistakes worth a look.
        is_told = self.data.class_names is not None and self.data.targets != "labels"
        is_last = step == self.plan.total_steps and is_told
        batches: list[BatchAnswers] | None = [] if is_last else None
        try:
            result = self._figures(batches)
        except NoImagesError as error:  # the weights are worth their training without a score, too
            state.last_eval, state.eval_pending, self.answers = {}, False, None
            log.error("step %d: %s. Training continues without a score; `vitkernels eval` gives one later", step, error)
            return
        self.answers = None if batches is None else collect(batches, self.data.val, self.parallel)
        state.last_eval, state.eval_pending = result, False
        self.logger.evaluation(step, {f"val_{k}": v for k, v in result.items() if not k.endswith("per_s")})
        self.logger.scalars(step, {f"val/{k}": v for k, v in result.items() if k != "images"})
        figures = ("map", "top1", "loss") if "map" in result else ("top1", "loss")
        found = {name: result.get(f"ema_{name}", result[name]) for name in figures}
        found |= {"step": step, "epoch": round(step / self.plan.steps_per_epoch, 4)}
        if is_better(found, state.best) and self._keep_as_best(found, saved):
            state.best = found
        of_ema = f"  EMA {result['ema_top1']:.2f} %" if "ema_top1" in result else ""
        precision = f"mAP {result['map']:.2f} %  " if "map" in result else ""
        log.info("step %d  val %stop-1 %.2f %%%s  loss %.4f", step, precision, result["top1"], of_ema, result["loss"])

    def _figures(self, answers: list[BatchAnswers] | None) -> dict:
        """Return what `evaluate` finds for the model, and for its EMA under ema_; `answers` gets those of the EMA."""
        of_model = answers if self.ema_net is None else None
        result = evaluate(self.net, self.data.val, self.parallel, answers=of_model)
        if self.ema_net is not None:
            average = evaluate(self.ema_net, self.data.val, self.parallel, "EMA eval", answers)
            result |= {f"ema_{k}": v for k, v in average.items() if k != "images"}
        return result

    def _keep_as_best(self, best: dict, saved: Path | None) -> bool:
        """Keep the weights as the best so far; return False, on all processes, if they could not be written."""
        if self.best_weights is None:
            return True
        weights = {"best": self.parallel.full_state_dict(self.model)}
        if self.ema is not None:
            weights["best_ema"] = self.parallel.full_state_dict(self.ema.module)
        return self.parallel.on_main(self.best_weights.keep, weights, best, saved)

    # ---- checkpoints ----

    def save(self) -> Path:
        """Start writing a checkpoint of this step and return its path; `attach` must have been called."""
        assert self.checkpoints is not None, "call attach before save"
        self.logger.flush()
        tensors, optimizer = optimizer_state.pack(self.optimizer, self.model)
        tensors = prefixed("optimizer", tensors) | prefixed("model", self.model.state_dict())
        tensors |= {} if self.ema is None else prefixed("ema", self.ema.module.state_dict())
        tensors[f"rng/{self.parallel.stream}"] = random_state(self.parallel.runtime)
        state = {
            **self.identity,
            "optimizer": optimizer,
            "scaler": self.scaler.state_dict(),
            "seconds": time.monotonic() - self.begin,
            **self.state.state_dict(),
            **self.notes,
        }
        return self.checkpoints.save(tensors, state, self.state.step)

    def resume(self, path: Path) -> None:
        """Restore weights, optimizer, random state and progress from a checkpoint of the same run."""
        read = partial(self.parallel.load, load_tensors)
        state = self.parallel.load(load_state, path)
        load_weights(self.model, read(path, "model", self.model.state_dict()), str(path))
        optimizer_state.load(self.optimizer, self.model, path, state["optimizer"], read)
        self.parallel.place_state(self.optimizer)
        if state["scaler"]:  # empty if the checkpoint was written in another precision
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None:
            load_weights(self.ema.module, read(path, "ema", self.ema.module.state_dict()), str(path))
        streams = read(path, "rng")
        if str(self.parallel.stream) in streams:  # an added process keeps its own new stream
            set_random_state(streams[str(self.parallel.stream)], self.parallel.runtime)
        self.state.load_state_dict(state)
        self.begin -= state.get("seconds", 0)
        self.scheduler.step_update(self.state.step)
        if self.checkpoints and self.best_weights:
            names = ["best"] if self.ema is None else ["best", "best_ema"]
            if not self.parallel.on_main(self.best_weights.restore, path, self.state.best, names):
                log.warning(
                    "the weights of the best step %d are gone; the next evaluation is the best", state["best"]["step"]
                )
                self.state.best = TrainState().best
            # A run that resumes in another folder keeps the best checkpoint there too.
            self.parallel.on_main(self.checkpoints.mark_best, path.with_name(folder_name(self.state.best["step"])))
        log.info("resumed from %s at step %d of %d", path, self.state.step, self.plan.total_steps)

    # ---- for error messages ----

    def _describe_samples(self, step: int, rank: int) -> str:
        train, ranks = self.data.train, range(self.parallel.world) if self.parallel.one_program else [rank]
        if train is None:
            return "unknown"
        ids = self.plan.sample_ids(train, step, ranks)
        more = f" and {len(ids) - 8} more" if len(ids) > 8 else ""
        return ", ".join(train.describe(ids[:8])) + more

    def describe_last_checkpoint(self) -> str:
        if self.checkpoints is None:
            return "This run keeps no checkpoints."
        self.checkpoints.wait()
        newest = next(iter(self.checkpoints.paths()), None)
        return f"The last good checkpoint is {newest}." if newest else "There is no checkpoint yet."
