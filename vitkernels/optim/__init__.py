"""Optimizers with kernels of their own."""

import logging

import torch

from vitkernels.errors import UsageError

log = logging.getLogger("vitkernels")


def with_kernel(optimizer: torch.optim.Optimizer, backend: str) -> torch.optim.Optimizer:
    """A new torch.optim.AdamW on a GPU as the one with the kernel, for backend "triton"; any other as it is.

    What the kernel cannot take, such as amsgrad and FSDP's parts of parameters, stays torch's, and the log says why.
    """
    if backend == "eager" or type(optimizer) is not torch.optim.AdamW:
        return optimizer
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or parameters[0].device.type != "cuda":
        log.info("ops.adamw stays torch's: its kernel is for NVIDIA GPUs")
        return optimizer
    options = {name: value for name, value in optimizer.defaults.items() if name != "decoupled_weight_decay"}
    try:
        from vitkernels.optim.adamw import AdamW

        return AdamW([dict(group) for group in optimizer.param_groups], **options)
    except (UsageError, ModuleNotFoundError) as reason:  # the latter where there is no Triton
        log.info("ops.adamw stays torch's: %s", reason)
        return optimizer
