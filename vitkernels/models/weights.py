"""Weights in and out: timm's parameter names everywhere, so files travel between backends and plain timm."""

import argparse
import logging
import math
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models import clean_state_dict
from torch import nn

from vitkernels.errors import UsageError

log = logging.getLogger("vitkernels")

# Under what names training programs keep weights in their checkpoints, timm's among them; averages are the better ones.
_EMA_KEYS = ("ema", "state_dict_ema", "model_ema")
_KEYS = (*_EMA_KEYS, "state_dict", "model")


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """The state dict in a .safetensors file, a torch file, or a training checkpoint (its EMA where it has one).

    A training checkpoint is a folder of ours, made by any number of processes, or a file of timm's. The prefixes of
    torch's wrappers (module., _orig_mod.) are taken off names, by timm.

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
            return clean_state_dict(load_file(path))
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm notes its arguments
            content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise UsageError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle errors have no common base, and give advice on how to be unsafe
        expected = "it is no .safetensors file, nor a state dict that torch.save wrote"
        raise UsageError(f"{path} cannot be read as weights: {expected} ({type(error).__name__})") from error
    key = next((k for k in _KEYS if isinstance(content, dict) and isinstance(content.get(k), dict)), None)
    if key is not None:
        log.info("weights: %s (%s) of %s", "the EMA" if key in _EMA_KEYS else "the model", key, path)
        content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()
    ):
        raise UsageError(f"{path} holds no state dict; expected parameter names mapped to tensors")
    return clean_state_dict(content)


def _of_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from vitkernels.checkpoint import checkpoints  # which imports torch.distributed: only where it is needed

    checkpoints.load_state(folder)
    averages = checkpoints.load_tensors(folder, "ema")
    log.info("weights: %s of %s", "the EMA" if averages else "the model", folder)
    return averages or checkpoints.load_tensors(folder, "model")


def fitted(state_dict: dict[str, torch.Tensor], model: nn.Module, new_classes: bool) -> dict[str, torch.Tensor]:
    """The state dict, to go on from with other images or classes: what `load_weights` takes. The log says what changed.

    Position embeddings for another number of patches are resampled, by timm. A head that is not there, or of other
    classes, of which `new_classes` tells where their number does not, is the model's own instead.
    """
    own, fits = model.state_dict(), dict(state_dict)
    positions, there = own.get("pos_embed"), state_dict.get("pos_embed")
    if positions is not None and there is not None and _only_tokens_differ(positions, there):
        prefix = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
        if math.isqrt(there.shape[1] - prefix) ** 2 == there.shape[1] - prefix:  # a square of patches
            fits["pos_embed"] = resample_abs_pos_embed(there, model.patch_embed.grid_size, num_prefix_tokens=prefix)
            log.info("pos_embed is resampled: %d tokens there, %d here", there.shape[1], positions.shape[1])
    head = {name: own[name] for name in own if name.partition(".")[0] in ("head", "head_dist")}
    shapes = [(tuple(state_dict[name].shape), tuple(x.shape)) for name, x in head.items() if name in state_dict]
    if head and not shapes:
        fits |= head
        log.info("the head begins anew: the weights have none")
    elif new_classes or any(a != b and a[1:] == b[1:] for a, b in shapes):
        fits |= {name: x for name, x in head.items() if name in state_dict}
        log.info("the head begins anew: its classes are others")
    return fits


def _only_tokens_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.ndim == b.ndim == 3 and a.shape[1] != b.shape[1] and a.shape[2] == b.shape[2]


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
        if own.keys() == state_dict.keys() and all(name.startswith("pos_embed ") for name in misshapen):
            complaints.append("they were trained on images of another size, model.img_size")
        raise UsageError(f"{source} belongs to another model: {'; '.join(complaints)}")
    model.load_state_dict(state_dict)
