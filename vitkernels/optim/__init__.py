"""Optimizers by name, and AdamW with a fused kernel."""

from vitkernels.optim.factory import KERNELS, create_optimizer, with_kernel

__all__ = ["KERNELS", "create_optimizer", "with_kernel"]
