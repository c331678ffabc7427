"""Every timm model with attention, reduced in depth and width: swapped attention keeps outputs and gradients.

All entry points of FAMILIES are built, reduced, on the meta device. Entry points with the same signature compute the
same at other sizes, so the smallest of each signature is run, in float64, against timm's own. The signature is the
model's class, its settings for rotary embeddings and relative positions, and of each attention module its class, the
classes of its children, and its settings that are not numbers (booleans, strings, what is None).
"""

import copy
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from torch import nn

from vitkernels import attention
from vitkernels.models import attention_plan, set_attention
from vitkernels.models.adapters.table import class_name


def each(value: int) -> Callable[[Any], tuple]:
    """Return a reduction that sets every entry of an argument, of any length."""
    return lambda old: (value,) * len(old)


VIT = {"depth": 1, "embed_dim": 48, "num_heads": 2, "img_size": 32, "patch_size": 8}
ENCODER = {**VIT, "num_kv_heads": lambda old: 1 if isinstance(old, int) else (1,)}
SWIN = {"img_size": 64, "embed_dim": 8, "depths": (2, 1), "num_heads": (1, 2), "window_size": 4}
FOUR = {"depths": (1, 1, 1, 1)}
# Family (a file of timm's models) -> size of the images and arguments that replace those of its models. A function is
# applied to the model's own argument, if there is one; "cfg" holds fields of a model's configuration.
FAMILIES: dict[str, tuple[int, dict[str, Any]]] = {
    "beit": (32, VIT),
    "cait": (32, {**VIT, "depth_token_only": 1}),
    "coat": (64, {"img_size": 64}),
    "convit": (32, {**VIT, "local_up_to_layer": 1, "depth": 2, "num_heads": 4, "embed_dim": 16}),
    "crossvit": (48, {"img_size": 48, "img_scale": (1.0, 2 / 3), "depth": ((1, 1, 0),)}),
    "csatv2": (64, {"depths": (1, 1, 2, 2), "transformer_depths": (0, 0, 1, 1)}),
    "davit": (64, {"depths": (1, 1), "embed_dims": (16, 32), "num_heads": (1, 2)}),
    "deepseek_vit": (32, VIT),
    "deit": (32, VIT),
    "edgenext": (64, {"depths": (1, 1, 1, 1), "global_block_counts": (0, 1, 1, 1)}),
    "efficientformer": (224, {**FOUR, "num_vit": 1}),  # its attention has 7 × 7 positions
    "efficientformer_v2": (64, {"img_size": 64}),
    "efficientvit_msra": (64, {"img_size": 64}),
    "eva": (32, ENCODER),
    "fastvit": (64, {"layers": each(1), "embed_dims": each(32)}),
    "gcvit": (64, {"img_size": 64, **FOUR, "embed_dim": 16, "num_heads": (1, 2, 2, 4)}),
    "gemma4_vit": (48, {**ENCODER, "img_size": 48, "patch_size": 16, "head_dim": 24, "intermediate_size": 64}),
    "hiera": (64, {"img_size": (64, 64), "stages": (1, 1, 1, 1), "embed_dim": 16}),
    "hieradet_sam2": (64, {"stages": (1, 1, 2, 1), "embed_dim": 16, "global_att_blocks": (3,)}),
    "levit": (64, {"img_size": 64, "depth": each(1), "embed_dim": each(64), "num_heads": each(2)}),
    "maxxvit": (64, {"img_size": 64, "cfg": {"depths": each(1)}}),
    "metaformer": (64, {**FOUR, "dims": (16, 16, 32, 32)}),
    "mobilevit": (64, {"img_size": 64}),
    "mvitv2": (64, {"img_size": 64, "cfg": {"depths": each(1), "embed_dim": lambda old: 48}}),
    "naflexvit": (32, VIT),
    "nest": (64, {"img_size": 64, "depths": (1, 1, 1), "embed_dims": (16, 16, 16), "num_heads": (1, 2, 2)}),
    "nextvit": (64, {}),
    "pvt_v2": (64, {**FOUR, "embed_dims": (16, 16, 32, 32), "num_heads": (1, 1, 2, 2)}),
    "qwen3_vit": (32, VIT),
    "swiftformer": (64, {}),
    "swin_transformer": (64, SWIN),
    "swin_transformer_v2": (64, {**SWIN, "pretrained_window_sizes": (0, 0)}),
    "swin_transformer_v2_cr": (64, SWIN),
    "tiny_vit": (64, {**FOUR, "embed_dims": (16, 32, 32, 32), "num_heads": (1, 2, 2, 2)}),
    "tnt": (32, {"img_size": 32, "depth": 1, "embed_dim": 32, "num_heads_outer": 2}),
    "twins": (64, {"img_size": 64, "depths": (2, 1, 1, 1), "embed_dims": each(32), "num_heads": each(2)}),
    "visformer": (64, {"img_size": 64, "depth": each(1)}),
    "vision_transformer": (32, VIT),
    "vision_transformer_hybrid": (64, {"img_size": 64, "depth": 1}),
    "vision_transformer_relpos": (32, VIT),
    "vision_transformer_sam": (32, {**VIT, "window_size": 2, "neck_chans": 16}),
    "vitamin": (64, {"img_size": 64, "depth": 1}),
    "volo": (64, {"img_size": 64, "layers": each(1), "embed_dims": each(32), "num_heads": each(2)}),
    "xcit": (32, {**VIT, "patch_size": 16}),
}


def reduced(family: str, name: str, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Return the entry point's model with the family's reductions, on the current default device."""
    module = importlib.import_module(f"timm.models.{family}")
    original, reductions = module.build_model_with_cfg, FAMILIES[family][1]

    def changed(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
        made = {key: value(old[key]) for key, value in new.items() if callable(value) and old.get(key) is not None}
        return {**old, **{key: value for key, value in new.items() if not callable(value)}, **made}

    def build(kind: type[nn.Module], variant: str, pretrained: bool, *args: Any, **kwargs: Any) -> nn.Module:
        cfg = reductions.get("cfg")
        if cfg is not None:
            known = kwargs["model_cfg"]
            kwargs["model_cfg"] = replace(known, **{key: value(getattr(known, key)) for key, value in cfg.items()})
        arguments = {key: value for key, value in reductions.items() if key != "cfg"}
        return original(kind, variant, pretrained, *args, **changed(kwargs, arguments))

    with monkeypatch.context() as patched:
        patched.setattr(module, "build_model_with_cfg", build)
        return timm.create_model(name, num_classes=3)


def signature(model: nn.Module) -> tuple:
    """Return what decides how a model's attention is computed, up to sizes."""
    plan = attention_plan(model)
    settings = {key: value for key, value in vars(model).items() if "rope" in key or "rel_pos" in key}
    modules = {_of_module(model.get_submodule(path)) for path in (*plan.replaceable, *plan.unsupported)}
    return class_name(model), repr(sorted(_kinds(settings))), tuple(sorted(modules))


def _of_module(module: nn.Module) -> str:
    children = [(name, type(child).__name__) for name, child in module.named_children()]
    parameters = [(name, parameter is None) for name, parameter in module._parameters.items()]
    return repr((class_name(module), children, parameters, sorted(_kinds(vars(module)))))


def _kinds(settings: dict[str, Any]) -> list[tuple[str, str]]:
    kept = {key: value for key, value in settings.items() if not key.startswith("_") and key != "training"}
    return [(key, repr(value)) for key, value in kept.items() if value is None or isinstance(value, bool | str)]


def representatives(family: str, monkeypatch: pytest.MonkeyPatch) -> dict[tuple, tuple[int, str]]:
    """Return signature -> (parameters, name) of the smallest entry point with attention; build all."""
    found: dict[tuple, tuple[int, str]] = {}
    for name in timm.list_models(module=family):
        with torch.device("meta"):
            model = reduced(family, name, monkeypatch)
        if attention_plan(model).replaceable:
            entry = sum(parameter.numel() for parameter in model.parameters()), name
            key = signature(model)
            found[key] = min(entry, found.get(key, entry))
    return found


def results(model: nn.Module, images: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    logits = model(images)
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits.square().mean().backward()
    return logits, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_swapped_attention__keeps_outputs_gradients_and_keys(family, monkeypatch):
    size = FAMILIES[family][0]
    for _, name in representatives(family, monkeypatch).values():
        torch.manual_seed(0)
        plain = reduced(family, name, monkeypatch).double().eval()
        for parameter in plain.parameters():  # so that a zero or a small LayerScale hides nothing
            nn.init.normal_(parameter, std=0.1)
        swapped = set_attention(copy.deepcopy(plain), attention.get("native"))
        assert list(swapped.state_dict()) == list(plain.state_dict())
        images = torch.randn(2, 3, size, size, dtype=torch.float64)
        (want, want_gradients), (found, gradients) = results(plain, images), results(swapped, images)
        # float64 sums in another order, relative to the largest value.
        scale = want.abs().max().item()
        assert scale > 0 and (found - want).abs().max().item() <= 1e-9 * scale, name
        largest = max(g.abs().max().item() for g in want_gradients.values() if g is not None)
        for key, gradient in want_gradients.items():
            other = gradients[key]
            assert (other is None) == (gradient is None), (name, key)
            assert gradient is None or (other - gradient).abs().max().item() <= 1e-8 * largest, (name, key)
