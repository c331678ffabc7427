"""Read, adapt and load weights under timm's parameter names, which are the same for every backend."""

import argparse
import logging
import math
import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.layers import resample_abs_pos_embed
from timm.models import clean_state_dict
from torch import nn

from vitkernels.errors import UsageError

log = logging.getLogger("vitkernels")

# Keys under which training programs, timm among them, store weights in their checkpoints; averages are preferred.
_EMA_KEYS = ("ema", "state_dict_ema", "model_ema")
_KEYS = (*_EMA_KEYS, "state_dict", "model")


def read_state_dict(path: str | Path) -> dict[str, torch.Tensor]:
    """Return the state dict in a .safetensors file, a torch file, or a training checkpoint (its EMA if it has one).

    A training checkpoint is a checkpoint folder of this package, written by any number of processes, or a file of
    timm's. Prefixes of torch's wrappers (module., _orig_mod.) are removed from parameter names. Torch files are read
    with weights_only, which executes nothing in them.

    Raises:
        UsageError: "models.weights_missing" if nothing is at `path`, "models.weights_unreadable" if the file is
            truncated or holds no state dict.
    """
    path = Path(path)
    if path.is_dir():
        return _from_checkpoint(path)
    if not path.is_file():
        message = f"no weights at {path}: no such file; expected a run's checkpoints/best, or a file of weights"
        raise UsageError(message, code="models.weights_missing", path=str(path))
    if path.suffix == ".safetensors":
        return clean_state_dict(_read(path, load_file))
    content = _read(path, _load_torch_file)
    key = next((k for k in _KEYS if isinstance(content, dict) and isinstance(content.get(k), dict)), None)
    if key is not None:
        log.info("weights: %s (%s) from %s", "EMA" if key in _EMA_KEYS else "model", key, path)
        content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in content.items()
    ):
        raise _unreadable(path, "it contains no state dict; expected parameter names mapped to tensors")
    return clean_state_dict(content)


def _read(path: Path, read):
    """Return `read(path)`, with its errors as UsageError."""
    reason = _what_else(path)
    if reason is not None:
        raise _unreadable(path, reason)
    try:
        return read(path)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL ([\w.]+)", str(error))
        raise _unreadable(
            path,
            f"refused for safety: the file would load {found[1] if found else 'arbitrary objects'} in addition to "
            "tensors, and loading could execute code. Export its state dict alone, with torch.save or as .safetensors",
        ) from error
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        raise _unreadable(path, str(error)) from error
    except Exception as error:  # pickle's errors share no base class, and recommend weights_only=False
        expected = f"expected a .safetensors file, or a state dict saved by torch.save ({type(error).__name__})"
        raise _unreadable(path, expected) from error


def _what_else(path: Path) -> str | None:
    """Describe a file that obviously holds no weights (empty, or text); return None for any other file."""
    with open(path, "rb") as file:
        start = file.read(512)
    if not start:
        return "the file is empty"
    printable = all(byte >= 32 or byte in b"\t\n\r" for byte in start)
    if printable:  # torch's files begin with PK, or with a binary pickle, safetensors with a length in 8 bytes
        return "it is a text file; expected a .safetensors file, or a state dict saved by torch.save"
    return None


def _load_torch_file(path: Path):
    with warnings.catch_warnings(), torch.serialization.safe_globals([argparse.Namespace]):  # timm stores its arguments
        warnings.simplefilter("ignore")  # torch warns of a pickle that torch.save did not write; it is refused
        return torch.load(path, map_location="cpu", weights_only=True)


def _unreadable(path: Path, reason: str) -> UsageError:
    return UsageError(f"could not read weights from {path}: {reason}", code="models.weights_unreadable", path=str(path))


def _from_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    from vitkernels.checkpoint import checkpoints  # imports torch.distributed, which other paths do not need

    checkpoints.load_state(folder)
    averages = checkpoints.load_tensors(folder, "ema")
    log.info("weights: %s from %s", "EMA" if averages else "model", folder)
    return averages or checkpoints.load_tensors(folder, "model")


def adapt_state_dict(
    state_dict: dict[str, torch.Tensor], model: nn.Module, new_classes: bool
) -> dict[str, torch.Tensor]:
    """Return a state dict for fine-tuning `model` at another image size or with other classes; log each change.

    Position embeddings of another number of patches are resampled by timm. The model's own classifier head is used if
    the state dict has no head, if its class count differs, or with `new_classes`, which covers other classes of the
    same count. Load the result with `load_weights`.
    """
    own, adapted = model.state_dict(), dict(state_dict)
    positions, loaded = own.get("pos_embed"), state_dict.get("pos_embed")
    if positions is not None and loaded is not None and _only_tokens_differ(positions, loaded):
        prefix = 0 if getattr(model, "no_embed_class", False) else getattr(model, "num_prefix_tokens", 0)
        if math.isqrt(loaded.shape[1] - prefix) ** 2 == loaded.shape[1] - prefix:  # a square grid
            patch_embed: Any = model.patch_embed
            grid = patch_embed.grid_size
            adapted["pos_embed"] = resample_abs_pos_embed(loaded, grid, num_prefix_tokens=prefix)
            log.info("position embedding resampled from %d to %d tokens", loaded.shape[1], positions.shape[1])
    head = {name: own[name] for name in own if name.partition(".")[0] in ("head", "head_dist")}
    shapes = [(tuple(state_dict[name].shape), tuple(x.shape)) for name, x in head.items() if name in state_dict]
    if head and not shapes:
        adapted |= head
        log.info("classifier head reinitialized: the weights have no head")
    elif new_classes or any(a != b and a[1:] == b[1:] for a, b in shapes):
        adapted |= {name: x for name, x in head.items() if name in state_dict}
        log.info("classifier head reinitialized: the classes differ")
    return adapted


def _only_tokens_differ(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.ndim == b.ndim == 3 and a.shape[1] != b.shape[1] and a.shape[2] == b.shape[2]


def load_weights(model: nn.Module, state_dict: dict[str, torch.Tensor], source: str) -> None:
    """Load a state dict strictly.

    source: origin of the state dict, for the error message.

    Raises:
        UsageError: "models.weights_mismatch" with the lists of names `missing`, `unexpected` and `misshapen`.
    """
    own = model.state_dict()
    mismatches = {
        "missing": [name for name in own if name not in state_dict],
        "unexpected": [name for name in state_dict if name not in own],
        "misshapen": [name for name in own if name in state_dict and own[name].shape != state_dict[name].shape],
    }
    if not any(mismatches.values()):
        model.load_state_dict(state_dict)
        return
    shapes = {
        name: f"{name} {tuple(state_dict[name].shape)} (the model has {tuple(own[name].shape)})"
        for name in mismatches["misshapen"]
    }
    problems = [
        f"{label} {', '.join(shapes.get(name, name) for name in names[:4])}"
        + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        for label, names in mismatches.items()
        if names
    ]
    if mismatches == {"missing": [], "unexpected": [], "misshapen": ["pos_embed"]}:
        problems.append("the weights were trained at another image size: set img_size, or use adapt_state_dict")
    message = f"weights of {source} do not match the model: {'; '.join(problems)}"
    raise UsageError(message, code="models.weights_mismatch", source=source, **mismatches)
