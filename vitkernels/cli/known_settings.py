"""The settings that exist: names in conf/, and the options of each group that have them."""

import difflib
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

# Settings below these names are passed on unchecked; the receiver refuses names that it does not know.
OPEN = ("attn.", "model.kwargs.", "optim.kwargs.", "data.mixup.")


def read_owners(config_dir: str) -> dict[str, list[str]]:
    """Return the dotted name of each setting, with the options (group=option) that have it.

    Settings of config.yaml itself have an empty list.
    """
    owners: dict[str, list[str]] = {name: [] for name in flat_names(_load(Path(config_dir) / "config.yaml"))}
    for path in sorted(Path(config_dir).glob("*/*.yaml")):
        group = path.parent.name
        if group != "experiment":  # an experiment only sets settings of other groups
            for name in flat_names({group: _load(path)}):
                owners.setdefault(name, []).append(f"{group}={path.stem}")
    return owners


def flat_names(node: dict, prefix: str = "") -> list[str]:
    """Return the dotted names of all values in a nested mapping."""
    names = []
    for key, child in node.items():
        names += flat_names(child, f"{prefix}{key}.") if isinstance(child, dict) and child else [f"{prefix}{key}"]
    return names


def suggestion(name: str, owners: dict[str, list[str]]) -> str:
    """Return "Did you mean ...? " with up to three settings, or "".

    They are names of the same group that contain this one (trainer.epochs: trainer.max_epochs), the same name in other
    groups (lr: optim.lr), or else names anywhere that contain it, or that are spelled alike.
    """
    group, _, last = name.rpartition(".")
    ends = {known: known.rpartition(".")[2] for known in owners}
    longer = [known for known, end in ends.items() if set(last.split("_")) < set(end.split("_"))]
    near = [known for known in longer if known.startswith(f"{group}.")]
    near += [known for known, end in ends.items() if end == last]
    near = near or longer or difflib.get_close_matches(name, owners, n=3, cutoff=0.75)
    return f"Did you mean {' or '.join(near[:3])}? " if near else ""


def _load(path: Path) -> dict:
    content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
    content.pop("defaults", None)
    return content
