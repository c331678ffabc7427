"""Export weights under timm's parameter names as safetensors, with notes on what they were trained on."""

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize

from vitkernels.files import write_atomically


def export_safetensors(state_dict: dict[str, torch.Tensor], path: Path, notes: dict) -> None:
    """Replace the file at `path` with these weights, atomically; `notes` go into its metadata, for `read_notes`."""
    metadata = {"format": "pt"}  # readers such as transformers require it
    metadata |= {name: json.dumps(note) for name, note in notes.items()}
    content = serialize({name: t.detach().cpu().contiguous() for name, t in state_dict.items()}, metadata)
    write_atomically(path, lambda file: file.write(content))


def read_notes(path: Path, names: Iterable[str]) -> dict:
    """Return the notes of these names from an exported file, without those it lacks; {} for files of other kinds."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError):  # a file that torch.save wrote
        return {}
    return {name: json.loads(metadata[name]) for name in names if name in metadata}
