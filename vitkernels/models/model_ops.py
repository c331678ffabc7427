"""Select fused ops for a timm model, in place; parameters and state-dict keys stay the same.

MODEL_OPS lists the ops. To add one, write its module in `fused_modules` and its entry here.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.models.vision_transformer import Block, VisionTransformer
from torch import nn

from vitkernels import attention, ops
from vitkernels.errors import UsageError, unknown_name
from vitkernels.models.adapters import adapted
from vitkernels.models.backend_attention import BackendAttention
from vitkernels.models.fused_families import FUSED_FAMILIES
from vitkernels.models.fused_linear import FusedLinear
from vitkernels.models.fused_modules import GATED_MLPS, ClassTokenViT, FusedBlock, FusedBlocks, FusedPatchConv
from vitkernels.models.fusion_checks import (
    block_unsupported,
    fusable_blocks,
    mlp_unsupported,
    patch_embed_unsupported,
    projections,
    projections_unsupported,
)
from vitkernels.models.wrapped import check_unwrapped
from vitkernels.module_swap import original_class
from vitkernels.registry.op import op_of, place_of

log = logging.getLogger("vitkernels")


@dataclass(frozen=True)
class OpSelection:
    """The ops to fuse in one model.

    backends: op name -> backend, or "auto"; timm computes the other ops.
    residual_dtype, keep_activation: see `set_ops`.
    """

    backends: Mapping[str, str]
    residual_dtype: torch.dtype | None
    keep_activation: bool


@dataclass(frozen=True)
class ModelOp:
    """An op that can replace part of a timm model.

    op: the function of `vitkernels.ops`.
    unsupported: returns why the op does not fit a model's architecture, or None if it does.
    apply: installs the op's modules in a model if the selection contains the op, and otherwise restores timm's.
        None if the modules of the op `requires` compute this op too.
    requires: name of an op that must be fused as well.
    """

    op: Callable
    unsupported: Callable[[nn.Module], str | None]
    apply: Callable[[nn.Module, OpSelection], None] | None
    requires: str | None = None


def _every_block(*checks: Callable[[nn.Module], str | None]) -> Callable[[nn.Module], str | None]:
    """Return a check of a model that returns the first reason of `checks` over its blocks."""

    def unsupported(model: nn.Module) -> str | None:
        blocks = fusable_blocks(model)
        if not blocks:
            return (
                "it has no blocks that can be fused: timm's pre-norm Block in model.blocks, or EVA's, BEiT's or Swin's"
            )
        reasons = (check(block) for check in checks for block in blocks.values())
        return next((reason for reason in reasons if reason is not None), None)

    return unsupported


def _apply_layer_norm_residual(model: Any, selection: OpSelection) -> None:
    """Replace the blocks by fused ones, which also compute the op mlp."""
    blocks = fusable_blocks(model)
    if "layer_norm_residual" in selection.backends:
        settings = {"ops": dict(selection.backends), "keep_activation": selection.keep_activation}
        for block in blocks.values():
            _give_attention_a_backend(block)
        if all(original_class(block) is Block for block in blocks.values()):
            model.blocks = FusedBlocks(*(FusedBlock.from_module(block, **settings) for block in blocks.values()))
            model.blocks.residual_dtype = selection.residual_dtype
            if type(model) is VisionTransformer and len(model.blocks):
                model.__class__ = ClassTokenViT
            return
        settings["residual_dtype"] = selection.residual_dtype
        for path, block in blocks.items():
            model.set_submodule(path, FUSED_FAMILIES[original_class(block)].from_module(block, **settings))
    elif isinstance(getattr(model, "blocks", None), FusedBlocks):  # from an earlier call
        model.blocks = nn.Sequential(*(block.to_original() for block in model.blocks))
        model.__class__ = original_class(model)
    else:
        for path, block in blocks.items():
            if type(block) in FUSED_FAMILIES.values():
                model.set_submodule(path, block.to_original())


def _give_attention_a_backend(block: Any) -> None:
    """Replace timm's own attention by the equivalent backend: fused blocks need its result before the projection."""
    if not isinstance(block.attn, BackendAttention):
        block.attn = adapted(block.attn, attention.get("sdpa" if block.attn.fused_attn else "native"))


def _apply_linear(model: nn.Module, selection: OpSelection) -> None:
    """Replace attention's projections, and the linear layers of a gated MLP, which the op mlp does not take."""
    backend = selection.backends.get("linear")
    for block in fusable_blocks(model).values():
        attn, mlp = getattr(block, "attn", None), getattr(block, "mlp", None)
        layers: list[tuple[Any, str, Any]] = [(attn, name, layer) for name, layer in projections(attn).items()]
        layers += [(mlp, name, getattr(mlp, name)) for name in GATED_MLPS.get(type(mlp), ())]
        for parent, name, layer in layers:
            if backend is not None and type(layer) in (nn.Linear, FusedLinear):
                is_qkv = name == "qkv" and getattr(attn, "keys_reach_scores", False)
                setattr(parent, name, FusedLinear.from_module(layer, backend=backend, is_qkv=is_qkv))
            elif type(layer) is FusedLinear:  # from an earlier call
                setattr(parent, name, layer.to_original())


def _apply_patch_embed(model: Any, selection: OpSelection) -> None:
    conv: Any = getattr(getattr(model, "patch_embed", None), "proj", None)
    if "patch_embed" in selection.backends:
        model.patch_embed.proj = FusedPatchConv.from_module(conv, backend=selection.backends["patch_embed"])
    elif isinstance(conv, FusedPatchConv):  # from an earlier call
        model.patch_embed.proj = conv.to_original()


MODEL_OPS = {
    "layer_norm_residual": ModelOp(
        ops.layer_norm_residual, _every_block(block_unsupported), _apply_layer_norm_residual
    ),
    "linear": ModelOp(ops.linear, _every_block(projections_unsupported), _apply_linear),
    "mlp": ModelOp(ops.mlp, _every_block(block_unsupported, mlp_unsupported), None, requires="layer_norm_residual"),
    "patch_embed": ModelOp(ops.patch_embed, patch_embed_unsupported, _apply_patch_embed),
}


def set_ops(
    model: nn.Module,
    backends: Mapping[str, str],
    residual_dtype: torch.dtype | None = None,
    keep_activation: bool = False,
    device: torch.device | str | None = None,
) -> nn.Module:
    """Select the backends that compute the ops of a timm model, in place, and return the model.

    Each call replaces the selection of the previous one. Call it before the model is compiled or wrapped.

    If residual additions are fused, timm's own attention is replaced by the equivalent backend: sdpa, or native if its
    fused_attn is off. Forward hooks run for blocks, qkv and proj, but not for modules inside a block whose parameters
    are passed to a fused op, such as norm1, attn and mlp.fc1.

    If the head of a VisionTransformer reads only the class token, what follows attention in the last block runs on that
    token alone: the logits do not depend on the other rows. Forward hooks of that block, of its norm2 and mlp, and of
    the final norm then see one token, and those of its fused proj do not run. forward_features returns all tokens.

    Args:
        backends: op (a key of MODEL_OPS) -> backend, "auto", "fused" for the device's own kernel (interpreted on a
            CPU), or "eager" for timm's modules; absent ops are "eager".
            mlp requires layer_norm_residual, which adds the MLP's last bias. linear applies to attention's projections.
        residual_dtype: dtype of the residual stream between blocks and of its gradient. None keeps timm's, which is
            float32 under autocast. bfloat16 halves the memory traffic of each residual addition, and rounds the stream.
        keep_activation: option of mlp: a faster backward pass, for one more hidden activation in memory per block.
        device: where the model will run, which decides what "auto" fuses; by default where its parameters are now.

    Raises:
        UsageError: "unknown_name" for an op or backend; "models.op_unsupported" if a named backend's op does not fit
            the architecture (with "auto", timm's modules are kept and the reason is logged); "models.op_requires" for
            mlp without layer_norm_residual; "models.op_option" for an option of an op that is not fused;
            "models.wrapped" for a model that is or contains a wrapped module (fully_shard, FSDP, DDP, DataParallel), or
            contains a compiled one.
    """
    check_unwrapped(model)
    if not isinstance(backends, Mapping):
        message = f"ops must be a mapping such as {{'mlp': 'auto'}}, got {backends!r}; ops: {', '.join(MODEL_OPS)}"
        raise UsageError(message, code="models.ops_type", ops=backends)
    for name, backend in backends.items():
        if name not in MODEL_OPS:
            raise unknown_name("op of a model", name, MODEL_OPS)
        if backend not in ("eager", "auto", "fused"):
            op_of(MODEL_OPS[name].op).get(backend)
    place = next(model.parameters()).device if device is None else torch.device(device)
    backends = {
        name: op_of(MODEL_OPS[name].op).kernel(place.type) if backend == "fused" else backend
        for name, backend in backends.items()
    }
    selection = OpSelection(_select(model, backends, device), residual_dtype, keep_activation)
    _check_options(backends, selection)
    for model_op in MODEL_OPS.values():
        if model_op.apply is not None:
            model_op.apply(model, selection)
    return model


def describe_ops(backends: Mapping[str, str], device: torch.device | str | None = None) -> str:
    """Return the argument of `set_ops` as text for a log, such as "eager except layer_norm_residual=triton".

    device: where the model runs; an op that is "auto" and has no kernel there is "eager" in the text.
    """
    if device is not None:
        without = {name for name in backends if not _has_kernel(name, torch.device(device))}
        backends = {
            name: "eager" if backend == "auto" and name in without else backend for name, backend in backends.items()
        }
    usual = Counter(backends.values()).most_common(1)[0][0]
    others = [f"{name}={backend}" for name, backend in backends.items() if backend != usual]
    return usual + (f" except {', '.join(others)}" if others else "")


def fused_by(model: nn.Module, backends: Mapping[str, str], device: torch.device | str) -> set[str]:
    """Return the ops that `set_ops` would fuse, without a log. Raises what `set_ops` raises for ops that do not fit."""
    return set(_select(model, backends, device, quiet=True))


def _select(
    model: nn.Module, backends: Mapping[str, str], device: torch.device | str | None = None, quiet: bool = False
) -> dict[str, str]:
    """Return the entries of `backends` to fuse: not "eager", and for "auto" only if a kernel exists and fits."""
    device = next(model.parameters()).device if device is None else torch.device(device)
    selected = {name: backend for name, backend in backends.items() if backend != "eager"}
    dropped = {
        name: f"no kernel for {device.type}"
        for name, backend in selected.items()
        if backend == "auto" and not _has_kernel(name, device)
    }
    selected = {name: backend for name, backend in selected.items() if name not in dropped}
    reasons = {name: reason for name in selected if (reason := MODEL_OPS[name].unsupported(model)) is not None}
    named = [f"{name}={selected[name]!r} ({reason})" for name, reason in reasons.items() if selected[name] != "auto"]
    if named:
        kind = original_class(model).__name__
        message = f'{kind} does not support {", ".join(named)}; set these ops to "eager" or "auto"'
        raise UsageError(message, code="models.op_unsupported", model=kind, reasons=reasons)
    dropped |= reasons
    for name in reasons:
        del selected[name]
    for name in list(selected):
        required = MODEL_OPS[name].requires
        if required is None or required in selected:
            continue
        if selected[name] != "auto":
            message = f"{name}={selected[name]!r} requires {required}, which is eager here; name a backend for both"
            raise UsageError(message, code="models.op_requires", op=name, requires=required)
        dropped[name] = f"it requires {required}, which is eager here"
        del selected[name]
    for reason in {} if quiet else dict.fromkeys(dropped.values()):
        names = [name for name, why in dropped.items() if why == reason]
        log.info("timm computes %s: %s", ", ".join(names), reason)
    return selected


def _has_kernel(name: str, device: torch.device) -> bool:
    """Return whether "auto" has a backend for this device."""
    return bool(op_of(MODEL_OPS[name].op).auto.get(place_of(device.type)))


def _check_options(backends: Mapping[str, str], selection: OpSelection) -> None:
    if selection.keep_activation and "mlp" not in selection.backends and backends.get("mlp", "eager") != "auto":
        message = (
            "keep_activation=True requires the op mlp, which is eager here; name its backend, such as mlp='passes'"
        )
        raise UsageError(message, code="models.op_option", option="keep_activation", op="mlp")
    if selection.residual_dtype is not None and "layer_norm_residual" not in selection.backends:
        raise UsageError(
            f"residual_dtype={selection.residual_dtype} requires the op layer_norm_residual, which is eager here; "
            "name its backend, such as layer_norm_residual='triton', or set residual_dtype=None",
            code="models.op_option",
            option="residual_dtype",
            op="layer_norm_residual",
        )
