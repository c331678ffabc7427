"""Record the training step as the lazy graph that torch_xla would send to a TPU, without executing it.

The trainer's own `train_step` runs on tensors without values: the first step creates the optimizer's state, and the
second is the step that every later one repeats. Its graph is captured at the point where torch_xla would execute it.
"""

import gc
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vitkernels import parallel
from vitkernels.bridge import lazy_target
from vitkernels.config import Config
from vitkernels.errors import UsageError
from vitkernels.models import ModelFacts
from vitkernels.runtime.base import Tensors, map_tensors
from vitkernels.runtime.xla import XlaRuntime

# Defaults of the report; overrides win. A step involves neither evaluation nor files.
DEFAULTS = ("data=fake", "trainer.eval_every=null", "checkpoints.every_epochs=null")
_OF_FAKE = "data.pool_batches=1"  # a setting that only data=fake has


@dataclass(frozen=True)
class RecordedStep:
    """A step's serialized HLO module, and {parameter: output} for weights and optimizer state that it updates."""

    module: bytes
    aliases: dict[int, int]


class RecordingRuntime(XlaRuntime):
    """torch_xla on placeholders, tensors of a shape and dtype without values; `recorded` is set by the second step."""

    recorded: RecordedStep | None = None

    def _device(self) -> torch.device:
        device = super()._device()
        # The step's inputs, by torch_xla's number for each; weak, so that the first step's own results can be freed.
        self._inputs = WeakTensorKeyDictionary()
        return device

    def feed(self, batches: Iterable[Tensors], sharding=None) -> Iterator[Tensors]:
        for batch in batches:
            yield map_tensors(placeholder, batch)

    def end_step(self, images: Tensor, targets: Tensor, kind: str = "train") -> None:
        import torch_xla

        xla = torch_xla._XLAC
        if not self._inputs:
            for tensor in live_tensors():
                empty = placeholder(tensor)
                self._inputs[tensor] = xla._xla_get_tensor_id(empty)
                tensor.data = empty  # torch_xla's own replacement would leave the pending updates in place
            return
        changed = [tensor for tensor in live_tensors() if not xla._is_placecholder(tensor)]
        module = xla._get_xla_tensors_hlo_proto(changed)
        outputs = {self._inputs[tensor]: n for n, tensor in enumerate(changed) if tensor in self._inputs}
        parameters, _ = xla._get_tensors_xla_device_data_node(changed)
        aliases = {n: outputs[number] for n, number in enumerate(parameters) if number in outputs}
        self.recorded = RecordedStep(module, aliases)


def live_tensors() -> list[Tensor]:
    """Return every live tensor on torch_xla's device: those that torch_xla.sync() would compute."""
    gc.collect()  # gradients can still be held by reference cycles
    found = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "xla"]
    return list({id(x): x for x in found}.values())


def placeholder(like: Tensor) -> Tensor:
    """Return a tensor on torch_xla's device with the shape and dtype of `like`, without values."""
    from torch_xla.core import xla_builder

    return xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)


def compose(overrides: tuple[str, ...]) -> Config:
    """Return the configuration of `python train.py` with the report's defaults and these overrides.

    Raises UsageError for unknown settings and invalid values.
    """
    from vitkernels.config.compose import compose as compose_config

    data = [word for word in (*DEFAULTS, *overrides) if word.startswith("data=")][-1]
    defaults = [*DEFAULTS, _OF_FAKE] if data == "data=fake" else DEFAULTS
    return compose_config([*defaults, *overrides, "runtime=xla", "mode=train"])


def model_facts(cfg: Config) -> ModelFacts:
    """Return the facts of the configuration's model, without allocating it."""
    from vitkernels import models

    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)
    return models.inspect_model(
        lambda backend: models.create_model(
            cfg.model.name,
            backend,
            num_classes=cfg.data.arguments.get("num_classes", 1000),
            img_size=cfg.model.img_size,
            in_chans=in_chans,
            **cfg.model.kwargs,
        ),
        image_size=image_size,
        in_chans=in_chans,
        batch_size=cfg.data.batch_size,
        dtype=torch.bfloat16,
        device_type="xla",
    )


def take_steps(cfg: Config, runtime: XlaRuntime, steps: int) -> None:
    """Build the training setup on `runtime` and take `steps` steps."""
    from vitkernels.training import setup

    options = vars(cfg.parallel)
    with parallel.create(runtime=runtime, accum_steps=cfg.trainer.accum_steps, **options) as strategy:
        trainer, _ = setup.trainer_from_config(cfg, strategy)
        if min(trainer.plan.total_steps, trainer.plan.steps_per_epoch) < steps:
            raise UsageError(
                f"recording requires {steps} steps within one epoch; raise trainer.max_steps or use a larger data set",
                code="tpu_estimate.too_few_steps",
                steps=steps,
            )
        trainer.net.train()
        assert trainer.data.train is not None
        batches = strategy.feed(trainer.plan.batches(trainer.data.train, 0))
        for _ in range(steps):
            trainer.train_step(batches)


def build(chip: str, *overrides: str) -> tuple[bytes, dict[int, int]]:
    """Record the step of `python train.py *overrides` for the chip; return what `compile_process.compile_in` takes.

    A process can record only one step, because recording leaves its torch_xla device without values.
    """
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["XLA_HLO_DEBUG"] = os.environ["XLA_IR_DEBUG"] = "1"  # operations carry the name of their torch function
    lazy_target.record_for("TPU", chip)
    cfg = compose(overrides)
    runtime = RecordingRuntime(cfg.runtime.precision)
    take_steps(cfg, runtime, steps=2)
    assert runtime.recorded is not None, "the second step sets it"
    return runtime.recorded.module, runtime.recorded.aliases
