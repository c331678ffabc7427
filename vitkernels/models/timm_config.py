"""Describe a trained model as timm's hub layout does: config.json, from which plain timm builds it."""

from collections.abc import Callable, Mapping
from typing import Any

import timm
import torch
from PIL import Image
from timm.data import create_transform
from torch import nn

from vitkernels.models.presets import PRESETS

Transform = Callable[[Image.Image], torch.Tensor]

# Presets have no name in timm: its ViT-B/16 with the preset's arguments is the same model.
_ARCHITECTURE_OF_PRESETS = "vit_base_patch16_224"


def timm_config(
    name: str,
    *,
    num_classes: int,
    input_size: list[int],
    kwargs: Mapping[str, Any],
    preprocessing: Mapping[str, Any],
    class_names: list[str] | None,
) -> dict[str, Any]:
    """Return the content of config.json in a folder that `timm.create_model("local-dir:FOLDER")` loads.

    Args:
        name: a timm model or a preset of this package.
        input_size: channels, height, width.
        kwargs: further arguments of the model; those that are None are left out.
        preprocessing: mean, std, interpolation, crop_pct and crop_mode of evaluation images.
        class_names: in the order of the outputs, None if unknown.
    """
    own = {key: value for key, value in kwargs.items() if value is not None}
    if name in PRESETS:
        architecture, classifier, global_pool = _ARCHITECTURE_OF_PRESETS, "head", None
        own = {**PRESETS[name], **own}
    else:
        architecture, known = name.partition(".")[0], _pretrained_cfg(name)
        classifier, global_pool = known.get("classifier") or "head", known.get("global_pool")
    own |= {"img_size": input_size[-1], "in_chans": input_size[0]}
    pretrained_cfg = {
        "input_size": input_size,
        "fixed_input_size": not own.get("dynamic_img_size", False),
        **{key: preprocessing[key] for key in ("mean", "std", "interpolation", "crop_pct", "crop_mode")},
        "num_classes": num_classes,
        "first_conv": "patch_embed.proj",
        "classifier": classifier,
    }
    pretrained_cfg |= {} if global_pool is None else {"global_pool": global_pool}
    pretrained_cfg |= {} if class_names is None else {"label_names": class_names}
    return {
        "architecture": architecture,
        "num_classes": num_classes,
        "model_args": own,
        "pretrained_cfg": pretrained_cfg,
    }


def _pretrained_cfg(name: str) -> dict[str, Any]:
    found = timm.get_pretrained_cfg(name, allow_unregistered=True)
    return {} if found is None else found.to_dict()


def model_of_timm_config(config: Mapping[str, Any], state_dict: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the plain timm model that `config` describes, with these weights, in evaluation mode."""
    cfg = {"architecture": config["architecture"], **config["pretrained_cfg"], "num_classes": config["num_classes"]}
    args = {**config.get("model_args", {}), "num_classes": config["num_classes"]}
    model = timm.create_model(config["architecture"], pretrained_cfg=cfg, **args)
    model.load_state_dict(dict(state_dict))
    return model.eval()


def transform_of_timm_config(config: Mapping[str, Any]) -> Transform:
    """Return timm's evaluation transform of the model: PIL image -> float32 (C, S, S), normalized."""
    cfg = config["pretrained_cfg"]
    chosen: dict[str, Any] = {name: cfg[name] for name in ("interpolation", "mean", "std", "crop_pct")}
    return create_transform(tuple(cfg["input_size"]), **chosen, crop_mode=cfg.get("crop_mode", "center"))
