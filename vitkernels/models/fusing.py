"""Gives an existing timm model fused operations, in place: the same parameters under the same names."""

import logging
from collections import Counter
from collections.abc import Mapping

import torch
from timm.layers import Attention
from torch import Tensor, nn

from vitkernels import attention
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.attention_layer import BackendAttention, attention_layer
from vitkernels.models.fused_blocks import (
    FusedBlock,
    FusedBlocks,
    FusedLinear,
    attention_unfusable,
    mlp_unfusable,
    unfusable,
)
from vitkernels.module_swap import SwappedModule
from vitkernels.ops import layer_norm_residual, linear, mlp, patch_embed
from vitkernels.registry.op import op_of, place_of

log = logging.getLogger("vitkernels")

_OPS = {op.__name__: op for op in (layer_norm_residual, linear, mlp, patch_embed)}
MODEL_OPS = tuple(_OPS)


def set_ops(
    model: nn.Module,
    ops: Mapping[str, str],
    residual_dtype: torch.dtype | None = None,
    keep_activation: bool = False,
) -> nn.Module:
    """Let the model compute these ops with these backends.

    ops: names from MODEL_OPS -> a backend's name, "auto", or "eager" (as timm does it, also where a name is absent).
        mlp needs layer_norm_residual, whose branches carry the MLP's last bias. linear is for attention's projections.
    residual_dtype: what the residual stream between the blocks, and its gradient, are kept in; None: as timm has them,
        which is float32 under autocast. bfloat16 halves the traffic of every seam, at the price of its rounding.
    keep_activation: mlp's option: a faster backward pass for one more hidden tensor in memory per block.

    Attention stays what it is: timm's own goes on as the backend that calculates the same, sdpa (native where timm's
    fused_attn is off); `set_attention` gives it another. Forward hooks run for whole blocks and for qkv and proj, but
    not for the modules inside a block whose parameters fused operations read, such as norm1, attn and mlp.fc1.

    Returns the model. Raises UsageError where a named backend's op does not fit the model's architecture; with "auto"
    that op stays timm's, and the log says why. Call it before the parameters are moved into a compiled model.
    """
    for name in ops:
        if name not in MODEL_OPS:
            raise unknown_name("op of a model", name, MODEL_OPS)
        if ops[name] not in ("eager", "auto"):
            op_of(_OPS[name]).get(ops[name])
    device = next(model.parameters()).device
    wanted = {name: b for name, b in ops.items() if b != "eager" and _has_kernel(name, b, device)}
    wanted = _fitting(wanted, model)
    if "mlp" in wanted and "layer_norm_residual" not in wanted:
        reason = "it is fused together with layer_norm_residual, which is eager here"
        if wanted.pop("mlp") != "auto":
            raise UsageError(f"mlp={ops['mlp']}: {reason}; name that one's backend (ops.layer_norm_residual=triton)")
        log.info("mlp stays as timm has it: %s", reason)
    if keep_activation and "mlp" not in wanted and ops.get("mlp", "eager") != "auto":
        raise UsageError("keep_activation is an option of mlp, which is eager here: name its backend (ops.mlp=passes)")
    if residual_dtype is not None and "layer_norm_residual" not in wanted:
        raise UsageError(
            f"a residual stream in {residual_dtype} needs layer_norm_residual, which is eager here; name its backend "
            "(ops.layer_norm_residual=triton, or ops=fused), or leave the stream as it is (ops.residual_precision=null)"
        )
    if "layer_norm_residual" in wanted:
        _give_backend(model)
        model.blocks = FusedBlocks(
            *(FusedBlock.from_module(block, ops=wanted, keep_activation=keep_activation) for block in model.blocks)
        )
        model.blocks.residual_dtype = residual_dtype
    elif isinstance(getattr(model, "blocks", None), FusedBlocks):  # of an earlier call
        model.blocks = nn.Sequential(*(block.to_original() for block in model.blocks))
    _set_linear(model, wanted.get("linear"))
    if "patch_embed" in wanted:
        model.patch_embed.proj = PatchConv.from_module(model.patch_embed.proj, backend=wanted["patch_embed"])
    elif isinstance(getattr(getattr(model, "patch_embed", None), "proj", None), PatchConv):
        model.patch_embed.proj = model.patch_embed.proj.to_original()
    return model


def ops_in_words(ops: Mapping[str, str]) -> str:
    """Which backends compute these ops (set_ops' argument, for a log): "eager but layer_norm_residual=mine"."""
    usual = Counter(ops.values()).most_common(1)[0][0]
    others = [f"{name}={backend}" for name, backend in ops.items() if backend != usual]
    return usual + (f" but {', '.join(others)}" if others else "")


def _give_backend(model: nn.Module) -> None:
    """Attention that is timm's own as a backend that calculates the same: fused blocks ask it for its result without
    the last bias."""
    for block in model.blocks:
        if type(block.attn) is Attention:
            backend = attention.get("sdpa" if block.attn.fused_attn else "native")
            block.attn = attention_layer(backend).adopt(block.attn)


def _set_linear(model: nn.Module, backend: str | None) -> None:
    """Attention's projections as the op `linear`, or with None as timm has them."""
    for attn in (getattr(block, "attn", None) for block in getattr(model, "blocks", ())):
        for name in ("qkv", "proj"):
            layer = getattr(attn, name, None)
            if backend is not None:
                is_qkv = name == "qkv" and _keys_reach_the_scores(attn)
                setattr(attn, name, FusedLinear.from_module(layer, backend=backend, is_qkv=is_qkv))
            elif type(layer) is FusedLinear:  # of an earlier call
                setattr(attn, name, layer.to_original())


def _keys_reach_the_scores(attn: nn.Module) -> bool:
    """Whether they do so as qkv gives them, without a norm."""
    return (
        isinstance(attn, BackendAttention)
        and isinstance(attn.q_norm, nn.Identity)
        and isinstance(attn.k_norm, nn.Identity)
    )


def _has_kernel(name: str, backend: str, device: torch.device) -> bool:
    """Whether "auto" can give this op anything better than timm's own on this device."""
    if backend != "auto" or op_of(_OPS[name]).auto.get(place_of(device.type)):
        return True
    log.info("%s stays as timm has it: it has no kernel for %s", name, device.type)
    return False


def _fitting(wanted: dict[str, str], model: nn.Module) -> dict[str, str]:
    """Those that fit the model. Of the others, those with "auto" are left out, with a line in the log; named ones are
    an error, all in one."""
    reasons = {name: reason for name in wanted if (reason := _misfit(name, model)) is not None}
    named = [f"{name}={wanted[name]}: {reason}" for name, reason in reasons.items() if wanted[name] != "auto"]
    if named:
        kind = type(model).__name__
        raise UsageError(f"what cannot run {kind}, set to eager or auto: {'; '.join(named)}")
    for name, reason in reasons.items():
        log.info("%s stays as timm has it: %s", name, reason)
    return {name: backend for name, backend in wanted.items() if name not in reasons}


def _misfit(name: str, model: nn.Module) -> str | None:
    if name == "patch_embed":
        return _patch_misfit(getattr(model, "patch_embed", None))
    if not isinstance(getattr(model, "blocks", None), nn.Sequential):
        return "it has no row of blocks"
    if name == "linear":
        reasons = [attention_unfusable(block) for block in model.blocks]
    else:
        reasons = [unfusable(block) for block in model.blocks]
    if name == "mlp":
        reasons += [mlp_unfusable(block) for block, reason in zip(model.blocks, reasons, strict=True) if reason is None]
    return next((reason for reason in reasons if reason is not None), None)


def _patch_misfit(patch_embed: nn.Module | None) -> str | None:
    conv = getattr(patch_embed, "proj", None)
    if not isinstance(conv, nn.Conv2d):
        return f"its patch embedding is {type(conv).__name__}, not one convolution"
    if conv.kernel_size != conv.stride or any(conv.padding) or conv.groups != 1 or conv.dilation != (1, 1):
        return f"its patch embedding is {conv}, whose patches overlap or leave gaps"
    pixels = getattr(patch_embed, "img_size", None) or ()  # none where sizes may vary
    if any(size % patch for size, patch in zip(pixels, conv.stride, strict=False)):
        return f"its images of {pixels[0]} x {pixels[1]} pixels do not divide into patches of {conv.stride[0]}"
    return None


class PatchConv(SwappedModule, nn.Conv2d):
    """A convolution over patches that do not overlap, as one matrix product; the same parameters."""

    backend: str

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, E, H / P, W / P): a view of (B, N, E), to which timm's flatten and transpose return."""
        tokens_BNE = patch_embed(images_BCHW, self.weight, self.bias, backend=self.backend)
        rows = images_BCHW.shape[2] // self.stride[0]
        return tokens_BNE.transpose(1, 2).unflatten(2, (rows, -1))
