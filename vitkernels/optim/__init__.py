"""Optimizers with kernels of their own."""

import logging

import torch

from vitkernels.errors import UsageError

log = logging.getLogger("vitkernels")


def with_kernel(optimizer: torch.optim.Optimizer, backend: str) -> torch.optim.Optimizer:
    """A new torch.optim.AdamW as the one with the kernel.

    backend: "triton", "eager" for the optimizer as it is, or "auto": the kernel where it can be had.
    What the kernel cannot take, such as a CPU's parameters, amsgrad, FSDP's parts of parameters and other optimizers,
    stays torch's with "auto", and the log says why; with "triton" it raises UsageError.
    """
    if backend == "eager":
        return optimizer
    try:
        return _with_kernel(optimizer)
    except (UsageError, ModuleNotFoundError) as reason:  # the latter where there is no Triton
        if backend != "auto":
            raise UsageError(f"ops.adamw={backend} cannot be had: {reason}; ops.adamw=auto does without") from reason
        log.info("the optimizer's step stays torch's: %s", reason)
        return optimizer


def _with_kernel(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    if type(optimizer) is not torch.optim.AdamW:
        raise UsageError(f"the kernel is for optim.opt=adamw, and this is {type(optimizer).__name__}")
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or parameters[0].device.type != "cuda":
        raise UsageError("the kernel is for NVIDIA GPUs")
    from vitkernels.optim.adamw import AdamW

    options = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    return AdamW([dict(group) for group in optimizer.param_groups], **options)
