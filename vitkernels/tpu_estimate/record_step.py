"""train.py's training step as the lazy graph that torch_xla would give a TPU: recorded on a CPU, never run.

train.py itself runs, with a runtime whose device holds no values: the first step makes the optimizer's state, the
second is the step that every later one repeats, and its graph is taken where it would be executed.
"""

import gc
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from vitkernels.bridge import lazy_target
from vitkernels.errors import UsageError
from vitkernels.runtime.xla import XlaRuntime

ROOT = Path(__file__).resolve().parents[2]
# What the report leaves out of a run, unless told otherwise: evaluation and files take no part in a step.
DEFAULTS = ("data=fake", "trainer.eval_every=null", "checkpoints.every_epochs=null")
_OF_FAKE = "data.pool_batches=1"  # which no other data set has


class Recorded(Exception):
    """The step's serialized HLO module, and {parameter: output} that are the same weights or optimizer state."""

    def __init__(self, module: bytes, aliases: dict[int, int]):
        super().__init__("the step is recorded")
        self.module, self.aliases = module, aliases


class RecordingRuntime(XlaRuntime):
    """torch_xla on placeholders: tensors of a shape and dtype and no values. The second step ends with Recorded."""

    def _device(self) -> torch.device:
        device = super()._device()
        # What the step begins with, and torch_xla's number of it; the first step's own results are not to live on.
        self._given = WeakTensorKeyDictionary()
        return device

    def feed(self, batches: Iterable[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in batches:
            yield tuple(placeholder(x) for x in batch)

    def end_step(self, images: Tensor, targets: Tensor, kind: str = "train") -> None:
        import torch_xla

        xla = torch_xla._XLAC
        if not self._given:
            for tensor in _live():
                empty = placeholder(tensor)
                self._given[tensor] = xla._xla_get_tensor_id(empty)
                tensor.data = empty  # torch_xla's own replacement would leave the updates that are pending on it
            return
        changed = [tensor for tensor in _live() if not xla._is_placecholder(tensor)]
        module = xla._get_xla_tensors_hlo_proto(changed)
        outputs = {self._given[tensor]: n for n, tensor in enumerate(changed) if tensor in self._given}
        parameters, _ = xla._get_tensors_xla_device_data_node(changed)
        raise Recorded(module, {n: outputs[number] for n, number in enumerate(parameters) if number in outputs})


def _live() -> list[Tensor]:
    """Every tensor on torch_xla's device that Python holds: what torch_xla.sync() would make real."""
    gc.collect()  # gradients can still lie in reference cycles
    found = [x for x in gc.get_objects() if issubclass(type(x), Tensor) and x.device.type == "xla"]
    return list({id(x): x for x in found}.values())


def placeholder(like: Tensor) -> Tensor:
    """A tensor on torch_xla's device of that shape and dtype, without values."""
    from torch_xla.core import xla_builder

    return xla_builder.create_placeholder_tensor(tuple(like.shape), like.dtype)


def compose(overrides: tuple[str, ...]):
    """train.py's configuration, the report's defaults under the `overrides`; raises UsageError as train.py would."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from vitkernels.cli import command_line
    from vitkernels.config.checks import check_settings

    folder = str(ROOT / "conf")
    data = [word for word in (*DEFAULTS, *overrides) if word.startswith("data=")][-1]
    defaults = [*DEFAULTS, _OF_FAKE] if data == "data=fake" else DEFAULTS
    try:
        with initialize_config_dir(folder, version_base="1.3"):
            cfg = hydra_compose("config", overrides=[*defaults, *overrides, "runtime=xla", "mode=train"])
    except (HydraException, OmegaConfBaseException) as error:
        raise UsageError(command_line.explain(error, folder)) from error
    check_settings(cfg)
    return cfg


def model_flops(cfg) -> int:
    """Of one step: forward and backward of all its batches, counted as train.py does."""
    from vitkernels import models

    image_size, in_chans = models.input_spec(cfg.model.name, cfg.model.img_size, cfg.model.in_chans)
    facts = models.inspect_model(
        lambda backend: models.create_model(
            cfg.model.name,
            backend,
            num_classes=cfg.data.get("num_classes", 1000),
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
    return facts.train_flops_per_image * cfg.data.batch_size * cfg.trainer.accum_steps


def build(chip: str, *overrides: str) -> tuple[bytes, dict[int, int]]:
    """Record the step of `python train.py *overrides` on that chip, for tpu_dump.compile_in; the process is used up."""
    os.environ["PJRT_DEVICE"] = "CPU"
    os.environ["XLA_HLO_DEBUG"] = os.environ["XLA_IR_DEBUG"] = "1"  # operations name the torch function they come from
    import train

    lazy_target.record_for("TPU", chip)
    with tempfile.TemporaryDirectory(prefix="vitkernels_step_") as folder:
        try:
            train.run(compose(overrides), Path(folder), lambda name, precision: RecordingRuntime(precision))
        except Recorded as recorded:
            return recorded.module, recorded.aliases
    raise UsageError("the run ended before its second step: trainer.max_steps and the epoch must have two")
