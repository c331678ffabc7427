"""Weights in and out: timm's parameter names everywhere, so files travel between backends and plain timm."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from vitkernels.errors import UsageError


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The state dict in a .safetensors file, a plain torch file, or a training checkpoint (its EMA where it has one).

    A training checkpoint is a folder, made by any number of processes.

    Torch files are read with weights_only: nothing in them is executed. Raises UsageError when the file is missing,
    truncated or holds something else.
    """
    path = Path(path)
    if path.is_dir():
        return _of_checkpoint(path)
    if not path.is_file():
        raise UsageError(f"no weights at {path}: no such file; give a run's checkpoints/best, or a file of weights")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle errors have no common base
        raise UsageError(f"{path} cannot be read as weights: {type(error).__name__}: {error}") from error
    for key in ("ema", "model", "state_dict"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
            break
    if not isinstance(content, dict) or not all(isinstance(v, torch.Tensor) for v in content.values()):
        raise UsageError(f"{path} holds no state dict; expected parameter names mapped to tensors")
    return content


def _of_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from vitkernels.training import checkpoint  # which imports torch.distributed: only where it is needed

    checkpoint.load_state(folder)
    return checkpoint.load_tensors(folder, "ema") or checkpoint.load_tensors(folder, "model")


def load_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], source: str) -> None:
    """Load a state dict strictly; a mismatch raises UsageError that names what is missing, left over or misshapen."""
    own = model.state_dict()
    missing = [name for name in own if name not in state_dict]
    extra = [name for name in state_dict if name not in own]
    misshapen = [
        f"{name} {tuple(state_dict[name].shape)}, the model has {tuple(own[name].shape)}"
        for name in own
        if name in state_dict and own[name].shape != state_dict[name].shape
    ]
    complaints = [
        f"{label}: {', '.join(names[:4])}{f' and {len(names) - 4} more' if len(names) > 4 else ''}"
        for label, names in (("missing", missing), ("left over", extra), ("of another shape", misshapen))
        if names
    ]
    if complaints:
        raise UsageError(f"{source} belongs to another model. {'; '.join(complaints)}")
    model.load_state_dict(state_dict)
