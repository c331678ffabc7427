"""Set the attention backend of an existing model, in place."""

import inspect
import logging
from typing import Any

from torch import nn

from vitkernels.attention import AttentionBackend
from vitkernels.errors import UsageError
from vitkernels.models.adapters import AttentionPlan, adapted, attention_plan
from vitkernels.models.backend_attention import backend_of
from vitkernels.models.wrapped import check_attention_unwrapped
from vitkernels.module_swap import original_class

log = logging.getLogger("vitkernels")


def set_attention(model: nn.Module, attn: str | AttentionBackend) -> nn.Module:
    """Let a backend compute the attention of a timm model in place, and return the model.

    Parameters remain the same tensors under the same names, so an existing optimizer stays valid. Attention modules
    that no backend can compute are left unchanged: a warning (logger "vitkernels") lists them with the reasons.
    `attention_plan` returns the same list beforehand.

    torch.nn.TransformerEncoder leaves out padding in evaluation and returns zeros there. With a backend, it computes
    padding as in training.

    Args:
        model: any module that contains attention of timm's (see `vitkernels.models.adapters.table`) or
            torch.nn.MultiheadAttention.
        attn: a backend or its name.

    Raises:
        UsageError: "models.attention" if no backend can compute any of the model's attention; "models.model_type" and
            "models.attn_type" for arguments of other types; "unknown_name" for the backend; "registry.unavailable" for
            a backend that cannot run on this machine; "models.wrapped" if fully_shard or torch.compile was applied to
            an attention module itself. The model is unchanged then.
    """
    swap(model, checked(model, attn))
    return model


def checked(model: nn.Module, attn: str | AttentionBackend) -> AttentionBackend:
    """Return the backend; raise what `set_attention` raises."""
    _check_model(model, attn)
    backend = backend_of(attn)
    plan, kind = attention_plan(model), original_class(model).__name__
    check_attention_unwrapped(model, plan)
    if "" in plan.replaceable:
        message = f"{kind} is itself an attention module, and only modules inside a model can be replaced in place"
        raise UsageError(message, code="models.attention", model=kind)
    if not plan.replaceable:
        message = f"no backend can compute the attention of {kind}: {why_none(model, plan)}"
        raise UsageError(message, code="models.attention", model=kind, unsupported=dict(plan.unsupported))
    return backend


def swap(model: nn.Module, backend: AttentionBackend) -> None:
    """Replace the attention modules that have an adapter, and warn about the others."""
    plan = attention_plan(model)
    replaced = {id(module): adapted(module, backend) for module in plan.replaceable.values()}
    for path, module in plan.replaceable.items():
        model.set_submodule(path, replaced[id(module)])
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # only torch's own attention can read such tensors
    if plan.unsupported and not any(p.is_meta for p in model.parameters()):
        log.warning(
            "%s: attention %s computes %d of %d attention layers; timm computes %s",
            *(original_class(model).__name__, backend.name, plan.count, plan.count + len(plan.unsupported)),
            plan.describe_unsupported(),
        )


def why_none(model: nn.Module, plan: AttentionPlan) -> str:
    """Return why a plan replaces no module."""
    return (
        plan.describe_unsupported()
        or f"{original_class(model).__name__} has no attention module, so it is not a transformer"
    )


def _check_model(model: Any, attn: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if isinstance(attn, nn.Module):
        message = f"the arguments are swapped: call set_attention(model, {model!r})"
    elif inspect.isclass(model) and issubclass(model, nn.Module):
        message = f"model must be an instance, got the class {model.__name__}: build it first, {model.__name__}(...)"
    else:
        message = f"model must be a torch.nn.Module, got {model!r}; timm.create_model(name) builds one"
    raise UsageError(message, code="models.model_type", model=model)
