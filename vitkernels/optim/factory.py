"""Build an optimizer by name, with timm's parameter groups and, for AdamW on NVIDIA GPUs, our fused kernel."""

import importlib
import inspect
import logging
from collections.abc import Mapping
from typing import Any

import timm.optim
import torch
from torch import nn

from vitkernels.errors import UsageError, unknown_name

log = logging.getLogger("vitkernels")

KERNELS = ("auto", "eager", "triton")


def create_optimizer(
    model: nn.Module,
    name: str,
    *,
    lr: float | None,
    weight_decay: float = 0.0,
    layer_decay: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
    defaults: Mapping[str, Any] | None = None,
    kernel: str = "eager",
) -> torch.optim.Optimizer:
    """Return an optimizer over the trainable parameters of `model`, grouped by timm.

    Args:
        name: an optimizer of timm's `create_optimizer_v2`, such as "adamw" or "lookahead_lamb", or the import path of a
            class, "package.module:Class" or "package.module.Class". The class is called as
            `Class(param_groups, lr=lr, **options)`; each group has "params" and "weight_decay", and with `layer_decay`
            also "lr_scale".
        lr: peak learning rate; None leaves the optimizer's default.
        weight_decay: not applied to biases, norms, and the parameters in `model.no_weight_decay()`.
        layer_decay: factor on the learning rate from each block to the one before it, in each group's "lr_scale".
        kwargs: further arguments of the optimizer.
        defaults: arguments that `kwargs` override, such as those that `Runtime.optimizer_kwargs(name)` returns.
        kernel: see `with_kernel`.

    Raises:
        UsageError: "unknown_name" for an unknown optimizer or kernel, "optim.import" for a class that cannot be
            imported, "optim.arguments" for arguments that the optimizer rejects, "optim.kernel" from `with_kernel`.
    """
    options = {**(defaults or {}), **(kwargs or {})}
    own_class = _import_class(name) if "." in name or ":" in name else None
    known: list[Any] = timm.optim.list_optimizers()  # names, as descriptions are not requested
    if own_class is None and name.lower().rpartition("_")[2] not in known:
        raise unknown_name("optimizer", name, known)
    try:
        if own_class is None:
            optimizer = timm.optim.create_optimizer_v2(
                model, opt=name, lr=lr, weight_decay=weight_decay, layer_decay=layer_decay, **options
            )
        else:
            rate: dict[str, Any] = {} if lr is None else {"lr": lr}
            optimizer = own_class(_param_groups(model, weight_decay, layer_decay), **rate, **options)
    except (ValueError, TypeError, AssertionError, ImportError, IndexError) as error:
        reason = _wrong_tuple(own_class or timm.optim.get_optimizer_class(name.lower().rpartition("_")[2]), options)
        raise UsageError(
            f"could not build optimizer {name!r} with lr={lr}, weight_decay={weight_decay}, "
            f"layer_decay={layer_decay}, {options}: {reason or error}",
            code="optim.arguments",
            name=name,
            options=options,
        ) from error
    return with_kernel(optimizer, kernel)


def with_kernel(optimizer: torch.optim.Optimizer, kernel: str) -> torch.optim.Optimizer:
    """Return a new torch.optim.AdamW as `vitkernels.optim.adamw.AdamW`, which has the same state dict.

    The kernel does not support CPU parameters, amsgrad, FSDP's sharded parameters, or optimizers other than
    torch.optim.AdamW.

    Args:
        optimizer: an optimizer that has not taken a step.
        kernel: "eager" returns `optimizer` unchanged; "triton" selects the kernel; "auto" selects it if it supports
            this optimizer, and otherwise logs the reason and returns `optimizer`.

    Raises:
        UsageError: "optim.kernel" if kernel="triton" is not supported here; "unknown_name" for an unknown kernel.
    """
    if kernel not in KERNELS:
        raise unknown_name("optimizer kernel", kernel, KERNELS)
    if kernel == "eager":
        return optimizer
    try:
        return _with_triton_kernel(optimizer)
    except (UsageError, ModuleNotFoundError) as reason:  # the latter if Triton is not installed
        if kernel != "auto":
            raise UsageError(
                f'kernel="{kernel}" is not supported here: {reason}; kernel="auto" falls back to torch',
                code="optim.kernel",
                kernel=kernel,
            ) from reason
        # Without a GPU there is no kernel to fall back from.
        level = logging.DEBUG if getattr(reason, "code", None) == "optim.kernel.device" else logging.INFO
        log.log(level, "optimizer kernel: falling back to torch: %s", reason)
        return optimizer


def _with_triton_kernel(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if type(optimizer) is not torch.optim.AdamW:
        name = type(optimizer).__name__
        raise UsageError(f"the kernel implements torch.optim.AdamW, got {name}", code="optim.kernel.class", name=name)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or parameters[0].device.type != "cuda":
        device = str(parameters[0].device) if parameters else None
        raise UsageError("the kernel runs on NVIDIA GPUs only", code="optim.kernel.device", device=device)
    from vitkernels.optim.adamw import AdamW

    options = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    return AdamW([dict(group) for group in optimizer.param_groups], **options)


def _import_class(path: str) -> type[torch.optim.Optimizer]:
    """Return the optimizer class at "package.module:Class" or "package.module.Class"."""
    module_name, _, class_name = path.partition(":") if ":" in path else path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"could not import optimizer {path!r}: {error}; expected package.module:Class, importable from here",
            code="optim.import",
            path=path,
        ) from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UsageError(f"{path!r} is not a subclass of torch.optim.Optimizer", code="optim.import", path=path)
    return found


def _wrong_tuple(optimizer: Any, options: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an option of several numbers, such as betas; the optimizers themselves do not say."""
    parameters = inspect.signature(optimizer).parameters
    for name, value in options.items():
        default = parameters[name].default if name in parameters else None
        if isinstance(default, tuple) and not (isinstance(value, list | tuple) and len(value) == len(default)):
            return f"{name} must be a list of {len(default)} numbers such as {list(default)}, got {value!r}"
    return None


def _param_groups(model: nn.Module, weight_decay: float, layer_decay: float | None) -> list[dict]:
    """Return the parameter groups that timm's create_optimizer_v2 makes for its own optimizers."""
    no_weight_decay: set[str] = getattr(model, "no_weight_decay", set)()
    if layer_decay is not None:
        return timm.optim.param_groups_layer_decay(
            model, weight_decay, no_weight_decay_list=no_weight_decay, layer_decay=layer_decay
        )
    return timm.optim.param_groups_weight_decay(model, weight_decay, no_weight_decay_list=no_weight_decay)
