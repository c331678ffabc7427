"""timm vision transformers with a chosen attention backend. No other package here knows timm's models."""

import timm
import torch
from timm.data import resolve_data_config
from timm.layers import Attention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitkernels import attention
from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.attention_layer import BackendAttention, attention_layer
from vitkernels.models.fusing import MODEL_OPS, ops_in_words, set_ops
from vitkernels.models.inspection import ModelFacts, inspect_model
from vitkernels.models.presets import PRESETS
from vitkernels.models.weights import fitted, load_weights, read_state_dict

__all__ = [
    "MODEL_OPS",
    "ModelFacts",
    "attention_layer",
    "create_model",
    "fitted",
    "input_spec",
    "inspect_model",
    "load_weights",
    "ops_in_words",
    "preprocessing",
    "read_state_dict",
    "set_attention",
    "set_ops",
    "timm_model",
]


def create_model(name: str, attn: str | AttentionBackend = "auto", **kwargs) -> nn.Module:
    """A VisionTransformer whose blocks attend with the backend `attn`.

    Args:
        name: a preset of this package (vit_b16_256, vit_digits) or any timm model built from timm's standard
            attention module: ViT, DeiT, register-token and dynamic_img_size variants. A tag as in
            "vit_base_patch16_224.augreg_in21k" is accepted.
        attn: a backend or its name.
        kwargs: timm's own, such as num_classes, img_size, in_chans, drop_path_rate, dynamic_img_size, pretrained.

    Raises:
        UsageError (a ValueError): no such name (close matches are offered), a keyword that the model does not take,
            or a model whose attention cannot be swapped. Nothing falls back silently.

    Parameter names are timm's own. An attention-pooling head, where the model has one, stays timm's.
    """
    backend = attention.get(attn) if isinstance(attn, str) else attn
    _check_swappable(name, kwargs)
    model = _build(name, attn_layer=attention_layer(backend), **kwargs)
    if not _blocks_attention(model):
        raise UsageError(_not_swappable(name, "its blocks do not take an attention class"))
    return model


def timm_model(name: str, **kwargs) -> nn.Module:
    """The same architecture with timm's own attention, for comparison."""
    return _build(name, **kwargs)


def set_attention(model: nn.Module, attn: str | AttentionBackend) -> nn.Module:
    """Give every block of an existing timm model (or one of ours) another attention backend, in place.

    Parameters stay the same tensors, so an optimizer that holds them goes on working. Returns the model.
    """
    backend = attention.get(attn) if isinstance(attn, str) else attn
    layer = attention_layer(backend)
    targets = [(n, m) for n, m in model.named_modules() if type(m) is Attention or isinstance(m, BackendAttention)]
    if not targets:
        raise UsageError(f"{type(model).__name__} has no timm.layers.Attention module whose kernel could be swapped")
    for path, module in targets:
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, layer.adopt(module))
    return model


def input_spec(name: str, img_size: int | None = None, in_chans: int | None = None) -> tuple[int, int]:
    """(image size in pixels, channels) that the model of that name expects, with overrides applied."""
    if name in PRESETS:
        size, chans = PRESETS[name]["img_size"], PRESETS[name].get("in_chans", 3)
    else:
        chans, size, _ = _pretrained_cfg(name).get("input_size", (3, 224, 224))
    return img_size or size, in_chans or chans


def preprocessing(name: str) -> dict:
    """How timm prepares images for the model of that name and its pretrained weights.

    Keys: mean and std (of red, green and blue in 0..1), interpolation, crop_pct and crop_mode, as
    timm.data.create_transform takes them. Empty for this package's presets, which have no such weights.
    """
    if name in PRESETS:
        return {}
    resolved = resolve_data_config(pretrained_cfg=_pretrained_cfg(name))
    colours = {key: list(resolved[key]) for key in ("mean", "std")}
    return colours | {key: resolved[key] for key in ("interpolation", "crop_pct", "crop_mode")}


def _pretrained_cfg(name: str) -> dict:
    """What timm knows of the weights of that name; of one without a tag, those that it would load."""
    _check_known(name)
    try:
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    except RuntimeError as error:  # a tag that it does not know
        raise UsageError(f"model {name!r}: {error}") from error
    return {} if cfg is None else cfg.to_dict()


def _check_known(name: str) -> None:
    if name not in PRESETS and not timm.is_model(name):
        raise unknown_name("model", name, _near(name))


def _near(name: str) -> list[str]:
    """Names to show for a typo: timm has far too many to list them all, and most take no attention backend."""
    import difflib

    fitting = [*PRESETS, *timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")]
    return difflib.get_close_matches(name, fitting, n=8, cutoff=0.4) or [*PRESETS]


def _build(name: str, **kwargs) -> nn.Module:
    _check_known(name)
    kwargs = {k: v for k, v in kwargs.items() if v is not None}
    try:
        if name in PRESETS:
            return VisionTransformer(**{**PRESETS[name], **kwargs})
        return timm.create_model(name, **kwargs)
    except TypeError as error:
        if "unexpected keyword" in str(error):
            raise UsageError(f"model {name!r}: {error}") from error
        raise
    except AssertionError as error:  # timm's way to refuse sizes that do not fit together
        raise UsageError(f"model {name!r} with {kwargs} cannot be built by timm: {error}") from error
    except OSError as error:
        if not kwargs.get("pretrained"):
            raise
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"the pretrained weights of model {name!r} cannot be fetched: {reason}. Fetch them once where there is a "
            "network (they stay in HF_HOME), or take a file of weights: checkpoint=PATH"
        ) from error


def _not_swappable(name: str, why: str) -> str:
    return (
        f"model {name!r} cannot take an attention backend: {why}. Models built from timm's vision_transformer "
        "and deit files with the standard attention can, e.g. vit_base_patch16_224 or deit_small_patch16_224."
    )


def _check_swappable(name: str, kwargs: dict) -> None:
    """Refuse models whose own attention is something else: injecting ours would train another architecture."""
    with torch.device("meta"):
        plain = _build(name, **{k: v for k, v in kwargs.items() if k != "pretrained"})
    others = {
        f"{type(m).__module__}.{type(m).__name__}"
        for path, m in plain.named_modules()
        if "Attention" in type(m).__name__ and type(m) is not Attention and not path.startswith("attn_pool")
    }
    if others:
        raise UsageError(_not_swappable(name, f"it attends with {', '.join(sorted(others))}"))
    if not any(type(m) is Attention for m in plain.modules()):
        raise UsageError(_not_swappable(name, f"{type(plain).__name__} has no timm.layers.Attention"))


def _blocks_attention(model: nn.Module) -> bool:
    """Whether the model attends with our module throughout."""
    kinds = [type(m) for m in model.modules() if isinstance(m, Attention)]
    return bool(kinds) and all(issubclass(kind, BackendAttention) for kind in kinds)
