"""torch.compile's modes as options, which strategies read before they compile."""

import torch
import torch._inductor


def compile_options(compiled: bool, mode: str | None) -> dict | None:
    """Return the options that `mode` stands for; None if the model is not compiled."""
    if not compiled:
        return None
    return torch._inductor.list_mode_options(mode) if mode else {}


def uses_cuda_graphs(options: dict | None) -> bool:
    """Return whether these options make torch.compile record and replay CUDA graphs."""
    return bool(options and options.get("triton.cudagraphs"))
