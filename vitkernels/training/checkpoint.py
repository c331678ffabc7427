"""Checkpoints that are whole or absent: written beside, synced to disk, then renamed into place."""

import logging
import os
import random
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save as serialize

from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

FORMAT = 1
_NAME = re.compile(r"step_(\d{8})\.pt")


class CheckpointError(UsageError):
    """A file that is no whole checkpoint of this program."""


class Checkpoints:
    """The checkpoints of one run: `step_*.pt`, the newest `keep` of them, and `best.pt`."""

    def __init__(self, folder: str | Path, keep: int = 2):
        if keep < 1:
            raise UsageError(f"checkpoints.keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep

    def save(self, state: dict, step: int) -> Path:
        """Write the state of `step`; a process killed at any moment leaves the earlier checkpoints whole.

        The newest `keep` up to this step stay. A disk that is full raises OSError and leaves what was there.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        path = self.folder / f"step_{step:08d}.pt"
        write_atomically(path, lambda file: torch.save({"format": FORMAT, "step": step, **state}, file))
        paths = self.paths()
        for old in paths[paths.index(path) :][self.keep :]:
            old.unlink()
        return path

    def mark_best(self, path: Path) -> None:
        """Keep a checkpoint as best.pt, however many follow."""
        link = self.folder / "best.pt.tmp"
        link.unlink(missing_ok=True)
        try:
            os.link(path, link)  # the same bytes under a second name, and renamed in one piece
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, link)
        os.replace(link, self.folder / "best.pt")

    def paths(self) -> list[Path]:
        """The run's checkpoints, newest first."""
        found = [(int(m[1]), p) for p in self.folder.glob("step_*.pt") if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def newest_whole(self) -> tuple[Path, dict] | None:
        """The newest checkpoint that can be read, with its content; broken ones are named in the log."""
        for path in self.paths():
            try:
                return path, load(path)
            except CheckpointError as error:
                log.warning("passed over a broken checkpoint: %s", error)
        return None

    def _remove_leftovers(self) -> None:
        for path in self.folder.glob("*.tmp"):
            path.unlink()


def load(path: str | Path) -> dict:
    """The content of one checkpoint, on the CPU, read with weights_only.

    Raises CheckpointError when the file is missing, truncated, damaged, or not a checkpoint of this program.
    """
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"no checkpoint at {path}: no such file")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load itself does not look at the checksums
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"wrong checksum of {damaged}")
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file can fail anywhere in the reader
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is not a whole checkpoint: {reason}") from error
    if not isinstance(content, dict) or "format" not in content:
        raise CheckpointError(f"{path} is a torch file, but not a training checkpoint of vitkernels")
    if content["format"] != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {content['format']}; this version reads {FORMAT}")
    return content


def write_atomically(path: Path, write) -> None:
    """Call `write(file)` on a temporary file beside `path`, sync it, and rename it over `path`."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError):  # torch's writer reports a full disk as an internal error of its own
            raise OSError(f"{path} could not be written: {str(error).splitlines()[0]}") from error
        raise
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the rename itself must survive a power cut
    finally:
        os.close(folder)


def export_safetensors(state_dict: dict[str, torch.Tensor], path: Path) -> None:
    """Weights under timm's names as safetensors, replaced in one piece."""
    content = serialize({name: t.detach().cpu().contiguous() for name, t in state_dict.items()})
    write_atomically(path, lambda file: file.write(content))


def to_cpu(state):
    """A nested state with every tensor on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: to_cpu(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return type(state)(to_cpu(value) for value in state)
    return state


# ---- random state: every generator that training draws from ----


def rng_state(runtime) -> dict:
    """States of Python's, NumPy's, PyTorch's and the device's generators, in types that weights_only reads."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (kind, torch.from_numpy(keys.astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        **runtime.rng_state(),
    }


def set_rng_state(state: dict, runtime) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(state["torch"])
    runtime.set_rng_state(state)
