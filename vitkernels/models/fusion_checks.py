"""Which blocks of a model can be fused: each check returns why an op does not fit, or None."""

from typing import Any

from timm.layers import Attention, LayerScale, Mlp
from timm.models.vision_transformer import Block
from torch import nn

from vitkernels.models.adapters.self_attention import HeadAttention
from vitkernels.models.adapters.table import refusal
from vitkernels.models.backend_attention import BackendAttention
from vitkernels.models.fused_families import FUSED_FAMILIES
from vitkernels.models.fused_linear import FusedLinear
from vitkernels.models.fused_modules import gelu_kind
from vitkernels.module_swap import original_class


def fusable_blocks(model: nn.Module) -> dict[str, Any]:
    """Return path -> block: all of model.blocks if it is a sequence, else those of families with fused blocks."""
    blocks = getattr(model, "blocks", None)
    if isinstance(blocks, nn.Sequential):
        return {f"blocks.{name}": block for name, block in blocks.named_children()}
    return {path: module for path, module in model.named_modules() if original_class(module) in FUSED_FAMILIES}


def block_unsupported(block: Any) -> str | None:
    """Return why the block's residual additions cannot be fused with its norms; None if they can."""
    kind = original_class(block)
    if kind is not Block and kind not in FUSED_FAMILIES:
        return f"its blocks are {kind.__name__}, expected timm's pre-norm Block, or EVA's, BEiT's or Swin's"
    attn, expected = block.attn, HeadAttention if kind is Block else BackendAttention
    if not isinstance(attn, expected) and (type(attn) is not Attention if kind is Block else refusal(attn)):
        return f"its attention is {type(attn).__name__}, expected timm's Attention"
    for norm in (block.norm1, block.norm2):
        if not isinstance(norm, nn.LayerNorm) or norm.weight is None or norm.bias is None:
            return f"its norm is {type(norm).__name__}, expected LayerNorm with weight and bias"
    for scale in (getattr(block, name, nn.Identity()) for name in ("ls1", "ls2")):
        if not isinstance(scale, LayerScale | nn.Identity):
            return f"its branch scale is {type(scale).__name__}, expected LayerScale"
    return None


def projections_unsupported(block: nn.Module) -> str | None:
    """Return why attention's projections cannot run as the op `linear`; None if they can."""
    attn = getattr(block, "attn", None)
    layers = projections(attn)
    for name in ("qkv", "proj") if "q_proj" not in layers else layers:
        kind = type(layers.get(name))
        if kind not in (nn.Linear, FusedLinear):
            return f"{type(block).__name__}.attn.{name} is {kind.__name__}, expected Linear"
    return None


def projections(attn: object) -> dict[str, nn.Module]:
    """Return the projections of an attention module that exist, packed or separate, by name."""
    layers = {name: getattr(attn, name, None) for name in ("qkv", "q_proj", "k_proj", "v_proj", "proj")}
    return {name: layer for name, layer in layers.items() if layer is not None}


def mlp_unsupported(block: Any) -> str | None:
    """Return why the block's MLP cannot run as the op `mlp`; None if it can."""
    m = block.mlp
    if type(m) is not Mlp:
        return f"its MLP is {type(m).__name__}, expected timm's Mlp"
    for layer in (m.fc1, m.fc2):
        if type(layer) is not nn.Linear:
            return f"its MLP has a {type(layer).__name__} layer, expected Linear"
    if gelu_kind(m.act) is None:
        return f"its MLP's activation is {type(m.act).__name__}, expected GELU"
    if not isinstance(m.norm, nn.Identity):
        return f"its MLP contains a norm, {type(m.norm).__name__}"
    return None


def patch_embed_unsupported(model: nn.Module) -> str | None:
    """Return why the model's patch embedding cannot run as the op `patch_embed`; None if it can."""
    embed = getattr(model, "patch_embed", None)
    conv = getattr(embed, "proj", None)
    if not isinstance(conv, nn.Conv2d):
        return f"its patch embedding is {type(conv).__name__}, expected a Conv2d"
    if conv.kernel_size != conv.stride or any(conv.padding) or conv.groups != 1 or conv.dilation != (1, 1):
        return f"its patch embedding is {conv}, whose patches overlap or leave gaps"
    pixels: tuple[int, ...] = getattr(embed, "img_size", None) or ()  # None if the model accepts any size
    if any(size % patch for size, patch in zip(pixels, conv.stride, strict=False)):
        return f"its image size {pixels[0]} x {pixels[1]} is not a multiple of the patch size {conv.stride[0]}"
    return None
