"""Build timm vision transformers by name, and set the attention backend of new and existing ones."""

import difflib
from typing import Any

import timm
import torch
from timm.data import resolve_data_config
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitkernels import attention
from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.backend_attention import BackendAttention, attention_layer
from vitkernels.models.download import check_download, download_error
from vitkernels.models.presets import PRESETS


def create_model(name: str, attn: str | AttentionBackend = "auto", **kwargs: Any) -> nn.Module:
    """Return a timm VisionTransformer whose blocks compute attention with the backend `attn`.

    Parameter names are timm's. If the model has an attention-pooling head, that head keeps timm's attention.

    Args:
        name: a preset (vit_b16_256, vit_digits) or a timm model built from timm's standard attention module: ViT, DeiT,
            register-token and dynamic_img_size variants. The name may carry a tag of pretrained weights, as in
            "vit_base_patch16_224.augreg_in21k".
        attn: a backend or its name.
        kwargs: timm's arguments, such as num_classes, img_size, in_chans, drop_path_rate, dynamic_img_size, pretrained.
            None leaves an argument at its default.

    Raises:
        UsageError: "unknown_name" for an unknown model or backend, "models.tag" for an unknown tag, "models.arguments"
            for arguments that the model rejects, "models.attention" for a model with another kind of attention,
            "models.download" for pretrained weights that cannot be fetched.
    """
    backend = attention.get(attn) if isinstance(attn, str) else attn
    _check_attention_is_standard(name, kwargs)
    model = _build(name, attn_layer=attention_layer(backend), **kwargs)
    if not _uses_backend_attention(model):
        raise _attention_error(name, "its blocks do not accept an attention class")
    return model


def timm_model(name: str, **kwargs: Any) -> nn.Module:
    """Return the same architecture with timm's own attention, as a baseline. Raises what `create_model` raises."""
    return _build(name, **kwargs)


def set_attention(model: nn.Module, attn: str | AttentionBackend) -> nn.Module:
    """Replace the attention backend of every block of a timm model in place, and return the model.

    Parameters remain the same tensors, so an existing optimizer stays valid.

    Raises:
        UsageError: "models.attention" if the model has no timm.layers.Attention; "unknown_name" for the backend.
    """
    backend = attention.get(attn) if isinstance(attn, str) else attn
    layer = attention_layer(backend)
    targets = [(n, m) for n, m in model.named_modules() if type(m) is Attention or isinstance(m, BackendAttention)]
    if not targets:
        kind = type(model).__name__
        message = f"{kind} has no timm.layers.Attention module, so its attention backend cannot be set"
        raise UsageError(message, code="models.attention", model=kind)
    for path, module in targets:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.from_module(module))
    return model


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
    if name not in PRESETS and not timm.is_model(name):
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


def _attention_error(name: str, why: str) -> UsageError:
    message = (
        f"model {name!r} does not support attention backends: {why}. Supported models use the standard attention of "
        "timm's vision_transformer and deit files, e.g. vit_base_patch16_224 or deit_small_patch16_224."
    )
    return UsageError(message, code="models.attention", name=name, why=why)


def _check_attention_is_standard(name: str, kwargs: dict[str, Any]) -> None:
    """Reject models with another attention module: replacing it would change the architecture."""
    plain = _build_on_meta(name, {k: v for k, v in kwargs.items() if k != "pretrained"})
    others = {
        f"{type(m).__module__}.{type(m).__name__}"
        for path, m in plain.named_modules()
        if "Attention" in type(m).__name__ and type(m) is not Attention and not path.startswith("attn_pool")
    }
    if others:
        raise _attention_error(name, f"its attention is {', '.join(sorted(others))}")
    if not any("attn" in path or "Attention" in type(m).__name__ for path, m in plain.named_modules()):
        raise _attention_error(name, f"{type(plain).__name__} has no attention, so it is no transformer")
    if not any(type(m) is Attention for m in plain.modules()):
        raise _attention_error(name, f"{type(plain).__name__} has no timm.layers.Attention")


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


def _uses_backend_attention(model: nn.Module) -> bool:
    """Return whether every attention module of the model is ours, and at least one exists."""
    kinds = [type(m) for m in model.modules() if isinstance(m, Attention)]
    return bool(kinds) and all(issubclass(kind, BackendAttention) for kind in kinds)
