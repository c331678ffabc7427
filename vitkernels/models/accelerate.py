"""Swap attention and fused ops of a stock timm ViT in one call, for a training loop that is not this package's."""

import logging
from collections.abc import Mapping

import torch
from timm.models.beit import Beit
from timm.models.eva import Eva
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError
from vitkernels.models.adapters import attention_plan
from vitkernels.models.attention_swap import checked, swap
from vitkernels.models.fused_modules import FusedLinear, FusedPatchConv, ResidualFusion
from vitkernels.models.model_ops import MODEL_OPS, set_ops
from vitkernels.module_swap import original_class

log = logging.getLogger("vitkernels")

_FUSABLE = (VisionTransformer, Eva, Beit, SwinTransformer)


def accelerate(
    model: nn.Module,
    attn: str | AttentionBackend = "auto",
    ops: str | Mapping[str, str] = "auto",
    device: torch.device | str | None = None,
) -> nn.Module:
    """Swap attention and the eligible fused ops of a timm ViT in place, and return the model.

    `model` may also contain the ViT, as open_clip's towers and transformers' TimmWrapper do. Parameters and state-dict
    keys stay the same, so existing optimizers and checkpoints stay valid; outputs differ by rounding alone. Call it
    before the model is compiled or wrapped by DDP or FSDP. One log line (logger "vitkernels", level INFO) states what
    was swapped; the lines before it give the reason for each op that timm still computes.

    Args:
        attn: a backend or its name; "auto" takes the fastest that supports each call.
        ops: "auto", "eager" (timm's modules), or op -> backend as `set_ops` takes it.
        device: where the model will run, which decides what "auto" fuses. Default: CUDA if PyTorch has a GPU, otherwise
            where the parameters are now.

    Raises:
        UsageError: as `set_attention` does; "unknown_name" for an op, "models.op_unsupported" if a named op does not
            fit. The model is unchanged then.
    """
    if device is None and torch.cuda.is_available():
        device = "cuda"
    if isinstance(ops, str):
        if ops not in ("auto", "eager"):
            message = f'ops={ops!r} is neither "auto" nor "eager"; name single ops as in ops={{"linear": {ops!r}}}'
            raise UsageError(message, code="models.ops_choice", ops=ops)
        ops = dict.fromkeys(MODEL_OPS, ops)
    backend = checked(model, attn)
    vits = [module for module in model.modules() if isinstance(module, _FUSABLE)]
    for vit in vits:
        set_ops(vit, ops, device=device)
    swap(model, backend)
    log.info("%s", _describe(model, backend.name, len(vits)))
    return model


def _describe(model: nn.Module, attn: str, vits: int) -> str:
    """Return what was swapped and in how many attention layers, as one line."""
    plan = attention_plan(model)
    layers = (
        f"{plan.count} of {plan.count + len(plan.unsupported)} layers" if plan.unsupported else f"{plan.count} layers"
    )
    kinds = {"block": ResidualFusion, "projection": FusedLinear, "patch embedding": FusedPatchConv}
    counts = {name: sum(isinstance(m, kind) for m in model.modules()) for name, kind in kinds.items()}
    fused = ", ".join(f"{n} {name}{'' if n == 1 else 's'}" for name, n in counts.items() if n) or "none"
    fused = fused if vits else "none, because no module is a timm VisionTransformer, Eva, Beit or SwinTransformer"
    return f"accelerated {original_class(model).__name__}: attention {attn} in {layers}; fused ops: {fused}"
