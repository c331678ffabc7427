"""Build timm vision transformers by name."""

import difflib
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.adapters import attention_plan
from vitkernels.models.attention_swap import swap, why_none
from vitkernels.models.backend_attention import backend_of
from vitkernels.models.download import check_download, download_error
from vitkernels.models.presets import PRESETS


def create_model(name: str, attn: str | AttentionBackend = "auto", **kwargs: Any) -> nn.Module:
    """Return a timm model whose attention the backend `attn` computes, as `set_attention` does.

    Parameter names are timm's.

    Args:
        name: a preset (vit_b16_256, vit_digits) or any timm model with attention that a backend can compute. The name
            may carry a tag of pretrained weights, as in "vit_base_patch16_224.augreg_in21k".
        attn: a backend or its name.
        kwargs: timm's arguments, such as num_classes, img_size, in_chans, drop_path_rate, dynamic_img_size, pretrained.
            None leaves an argument at its default.

    Raises:
        UsageError: "unknown_name" for an unknown model or backend, "models.tag" for an unknown tag, "models.arguments"
            for arguments that the model rejects, "models.attention" for a model without attention that a backend can
            compute, "models.download" for pretrained weights that cannot be fetched, "registry.unavailable" for a
            backend that cannot run on this machine.
    """
    backend = backend_of(attn)
    # Refused before a download, and before memory is filled.
    plain = _build_on_meta(name, {k: v for k, v in kwargs.items() if k != "pretrained"})
    _check_mlp_ratio(plain, name, kwargs.get("mlp_ratio"))
    plan = attention_plan(plain)
    if not plan.replaceable:
        why = why_none(plain, plan)
        message = f"no backend can compute the attention of model {name!r}: {why}"
        raise UsageError(message, code="models.attention", name=name, why=why)
    model = _build(name, **kwargs)
    swap(model, backend)
    return model


def _check_mlp_ratio(model: nn.Module, name: str, ratio: Any) -> None:
    """Raise UsageError for a ratio that rounds an MLP's width to 0, which timm replaces by its input's width."""
    if not isinstance(ratio, int | float):
        return
    for path, layer in model.named_modules():
        is_first = isinstance(layer, nn.Linear) and path.rpartition(".")[2].startswith("fc1")
        if not is_first or int(layer.in_features * ratio) > 0:
            continue
        width = layer.in_features
        raise UsageError(
            f"model {name!r} with mlp_ratio={ratio:g}: {path} would have int({width} * {ratio:g}) = 0 outputs, for "
            f"which timm silently takes {width}. Use mlp_ratio=1 for {width}, and {1 / width:.2g} or more for fewer",
            code="models.arguments",
            name=name,
            mlp_ratio=ratio,
            layer=path,
            in_features=width,
        )


def timm_model(name: str, **kwargs: Any) -> nn.Module:
    """Return the same architecture with timm's own attention, as a baseline. Raises what `create_model` raises."""
    return _build(name, **kwargs)


def is_known(name: str) -> bool:
    """Return whether `create_model` knows the name, with or without a tag: as a preset, or as any model of timm."""
    return name in PRESETS or timm.is_model(name)


def takes_argument(name: str, argument: str, value: Any) -> bool:
    """Return whether the model takes an argument of this name, even if it rejects this value."""
    try:
        _build_on_meta(name, {argument: value})
    except UsageError as error:
        return error.code == "models.arguments" and "unexpected keyword" not in str(error)
    return True


def input_spec(name: str, img_size: int | None = None, in_chans: int | None = None) -> tuple[int, int]:
    """Return (image size in pixels, channels) of the model's input; arguments other than None take precedence."""
    size: Any
    chans: Any
    if name in PRESETS:
        size, chans = PRESETS[name]["img_size"], PRESETS[name].get("in_chans", 3)
    else:
        chans, size, _ = _pretrained_cfg(name).get("input_size", (3, 224, 224))
    return img_size or size, in_chans or chans


def preprocessing(name: str) -> dict[str, Any]:
    """Return timm's image preprocessing for the model and its pretrained weights.

    Keys, as in timm.data.create_transform: mean and std (of red, green and blue in 0..1), interpolation, crop_pct and
    crop_mode. Empty for the presets, which have no pretrained weights.
    """
    if name in PRESETS:
        return {}
    resolved = resolve_data_config(pretrained_cfg=_pretrained_cfg(name))
    colours = {key: list(resolved[key]) for key in ("mean", "std")}
    return colours | {key: resolved[key] for key in ("interpolation", "crop_pct", "crop_mode")}


def _pretrained_cfg(name: str) -> dict[str, Any]:
    """Return timm's configuration of the named pretrained weights; without a tag, of the model's default weights."""
    _check_known(name)
    try:
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError as error:
        raise UsageError(f"model {name!r}: {error}", code="models.tag", name=name) from error
    return {} if cfg is None else cfg.to_dict()


def _check_known(name: str) -> None:
    if not is_known(name):
        raise unknown_name("model", name, _similar_names(name))


def _similar_names(name: str) -> list[str]:
    """Return the names to list for a typo. timm has over a thousand, most of them without a swappable attention."""
    swappable = [*PRESETS, *timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")]
    return difflib.get_close_matches(name, swappable, n=8, cutoff=0.4) or [*PRESETS]


def _build(name: str, **kwargs: Any) -> nn.Module:
    _check_known(name)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    if kwargs.get("pretrained"):
        check_download(name, _pretrained_cfg(name))
    try:
        if name in PRESETS:
            return VisionTransformer(**{**PRESETS[name], **kwargs})
        return timm.create_model(name, **kwargs)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise UsageError(f"model {name!r}: {error}", code="models.arguments", name=name) from error
        raise
    except AssertionError as error:  # timm asserts that sizes are compatible
        message = f"timm cannot build model {name!r} with {kwargs}: {error}"
        raise UsageError(message, code="models.arguments", name=name, kwargs=kwargs) from error
    except OSError as error:
        if not kwargs.get("pretrained"):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise download_error(name, reason) from error


def _build_on_meta(name: str, kwargs: dict[str, Any]) -> nn.Module:
    """Return the model without storage; there, any failure is one of its arguments."""
    try:
        with torch.device("meta"):
            return _build(name, **kwargs)
    except UsageError:
        raise
    except Exception as error:
        given = {k: v for k, v in kwargs.items() if v is not None}
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"timm cannot build model {name!r} with {given}: {reason}"
        raise UsageError(message, code="models.arguments", name=name, kwargs=given) from error
