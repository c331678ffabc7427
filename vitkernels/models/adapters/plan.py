"""Find the attention modules of a model that an adapter can replace, and the reasons why others cannot be replaced."""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from vitkernels.errors import UsageError
from vitkernels.models.adapters.table import ADAPTERS, REFUSED, class_name, refusal
from vitkernels.models.backend_attention import BackendAttention


@dataclass(frozen=True)
class AttentionPlan:
    """The attention modules of a model, by path.

    replaceable: the modules whose attention a backend can compute. A module that is used in two places has two paths.
    unsupported: path -> (class, reason for leaving the module unchanged).
    """

    replaceable: Mapping[str, nn.Module]
    unsupported: Mapping[str, tuple[str, str]]

    @property
    def count(self) -> int:
        """Return the number of modules that a backend can compute."""
        return len({id(module) for module in self.replaceable.values()})

    def describe_unsupported(self) -> str:
        """Return the classes that are left unchanged, each with its number of modules and the reason."""
        counts = Counter(self.unsupported.values())
        return "; ".join(f"{count} {kind} ({reason})" for (kind, reason), count in sorted(counts.items()))


def attention_plan(model: nn.Module) -> AttentionPlan:
    """Return which attention modules of a model `set_attention` replaces, and why it leaves the others unchanged.

    Raises UsageError "models.model_type" for an argument that is no module.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model must be a torch.nn.Module, got {model!r}", code="models.model_type", model=model)
    replaceable: dict[str, nn.Module] = {}
    unsupported: dict[str, tuple[str, str]] = {}
    unknown: dict[str, tuple[str, str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        name = class_name(module)
        if isinstance(module, BackendAttention) or name in ADAPTERS or name in REFUSED:
            reason = refusal(module)
            if reason is None:
                replaceable[path] = module
            else:
                unsupported[path] = name, reason
        elif re.search("Attn|Attention", type(module).__name__):
            unknown[path] = name, refusal(module) or ""
    known = (*replaceable, *unsupported)
    for path, entry in unknown.items():
        inside = f"{path}." if path else ""
        is_container = any(other.startswith(inside) for other in (*known, *unknown) if other != path)
        is_part = any(path.startswith(f"{other}.") for other in known)
        if not (is_container or is_part):
            unsupported[path] = entry
    return AttentionPlan(replaceable, unsupported)
