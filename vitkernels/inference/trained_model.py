"""Open what a run trained as a plain timm model, with its class names and its preprocessing."""

import logging
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitkernels import models
from vitkernels.checkpoint.trained_on import TrainedOn, read_trained_on
from vitkernels.config.saved import find_run, read_settings
from vitkernels.data.images import PREPROCESSING
from vitkernels.errors import UsageError, unknown_name
from vitkernels.files import read_json
from vitkernels.models.timm_config import Transform, model_of_timm_config, timm_config, transform_of_timm_config

log = logging.getLogger("vitkernels")

# Files of a run, in order of preference. With an EMA, its accuracy decides which evaluation is the best.
WHICH = {
    "best": ("best_ema.safetensors", "best.safetensors", "checkpoints/best"),
    "last": ("model.safetensors",),
    "ema": ("model_ema.safetensors",),
}


@dataclass(frozen=True)
class TrainedModel:
    """Trained weights, and all that is needed to use them.

    weights: the file or checkpoint folder. run: the run's folder, None for a folder in timm's layout. config: the
    content of timm's config.json.
    """

    weights: Path
    run: Path | None
    config: dict[str, Any]

    @property
    def input_size(self) -> list[int]:
        """Channels, height and width of the model's input."""
        return list(self.config["pretrained_cfg"]["input_size"])

    @property
    def class_names(self) -> list[str]:
        """The outputs' class names; their numbers if the data set has no names."""
        names = self.config["pretrained_cfg"].get("label_names")
        return names or [str(number) for number in range(self.config["num_classes"])]

    @cached_property
    def state_dict(self) -> dict[str, torch.Tensor]:
        """The weights on the CPU, under timm's parameter names."""
        return models.read_state_dict(self.weights)

    def build(self) -> nn.Module:
        """Return the plain timm model with these weights, on the CPU, in evaluation mode."""
        return model_of_timm_config(self.config, self.state_dict)

    def transform(self) -> Transform:
        """Return the run's evaluation transform: PIL image -> float32 (C, S, S), normalized."""
        return transform_of_timm_config(self.config)


def open_trained(path: str | Path, which: str = "best") -> TrainedModel:
    """Open a run's weights, one of its checkpoints or weight files, or a folder in timm's layout.

    Args:
        path: the folder of a run, a file or checkpoint in one, or a folder with timm's config.json.
        which: the weights of a run's folder, a key of WHICH. Other paths name the weights themselves.

    Raises:
        UsageError: "inference.no_run" if the path belongs to no run, "inference.no_weights" if the run has no such
            weights (yet), "unknown_name" for `which`.
    """
    path = Path(path)
    if which not in WHICH:
        raise unknown_name("weights of a run", which, WHICH)
    config = read_json(path / "config.json") if path.is_dir() else None
    if config is not None and "architecture" in config and "pretrained_cfg" in config:
        return TrainedModel(path / "model.safetensors", None, config)
    run = find_run(path)
    if run is None:
        kind = "belongs to no run" if path.exists() else "does not exist"
        raise UsageError(
            f"{path} {kind}: name the folder of a run, weights in one, or a folder with timm's config.json",
            code="inference.no_run",
            path=str(path),
        )
    weights = _weights_of(run, which) if path.resolve() == run.resolve() else path
    opened = TrainedModel(weights, run, {})
    return TrainedModel(weights, run, _config(run, read_trained_on(weights), opened.state_dict))


def _weights_of(run: Path, which: str) -> Path:
    found = [run / name for name in WHICH[which] if (run / name).exists()]
    if found:
        return found[0]
    there = [name for name, files in WHICH.items() if any((run / file).exists() for file in files)]
    hint = f"it has {' and '.join(there)}" if there else "it has not been evaluated yet"
    message = f"{run} has no {which} weights ({' or '.join(WHICH[which])}); {hint}"
    raise UsageError(message, code="inference.no_weights", run=str(run), which=which, choices=there)


def _config(run: Path, trained_on: TrainedOn, state_dict: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = read_settings(run)["model"]
    image_size, in_chans = models.input_spec(model["name"], model.get("img_size"), model.get("in_chans"))
    prepared = trained_on.preprocessing or trained_on.file_preprocessing
    if prepared is None:
        prepared = PREPROCESSING | models.preprocessing(model["name"])
        if in_chans != len(prepared["mean"]):
            prepared |= {name: [sum(prepared[name]) / len(prepared[name])] * in_chans for name in ("mean", "std")}
        log.info("the data set records no preprocessing; the export has timm's for %s", model["name"])
    head = [tensor for name, tensor in state_dict.items() if name == "head.weight"]
    return timm_config(
        model["name"],
        num_classes=len(head[0]) if head else len(trained_on.class_names or ()),
        input_size=[in_chans, image_size, image_size],
        kwargs=model.get("kwargs") or {},
        preprocessing=prepared,
        class_names=trained_on.class_names,
    )
