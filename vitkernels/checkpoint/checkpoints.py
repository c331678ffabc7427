"""Checkpoints that are whole or absent: folders of safetensors, written beside training and renamed into place.

    step_00000040/rank_00000.safetensors ...   tensors, or parts of them, by whichever process wrote them
    step_00000040/state.json                   everything else, and the size and checksum of each file beside it
    best -> step_00000020                      the best so far, kept however many follow

Written and read by torch.distributed.checkpoint, so that any number of processes reads what any other number wrote.
Nothing in them is executed: there is no pickle. Several hosts under torchrun need one file system for them; of those of
a TPU slice the first alone writes and reads.
"""

import json
import logging
import os
import random
import re
import shutil
import warnings
import zlib
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as serialize
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from vitkernels.errors import UsageError

log = logging.getLogger(__name__)

FORMAT = 2
BEST = "best"
_NAME = re.compile(r"step_(\d{8})")
# One process needs no process group, and is not to be warned of that at each checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(UsageError):
    """Something that is no whole checkpoint of this program."""


class Checkpoints:
    """The checkpoints of one run: `step_*`, the newest `keep` of them, and `best`.

    group: the process group of all that write, with a CPU backend, used by nothing else; None for one process.
    writes: whether this process is one of them.
    """

    def __init__(self, folder: str | Path, keep: int = 2, group=None, writes: bool = True):
        if keep < 1:
            raise UsageError(f"checkpoints.keep must be at least 1, got {keep}")
        self.folder = Path(folder)
        self.keep = keep
        self.group = group
        self.writes = writes
        self._writing: tuple[Path, Future] | None = None

    def save(self, tensors: dict[str, torch.Tensor], state: dict, step: int) -> Path:
        """Begin to write the checkpoint of `step`; what it holds is copied before this returns.

        All processes call it, those that do not write too: to copy what lies on all devices takes all.

        tensors: by name; each process's own, whole or as a DTensor. state: what JSON can hold, the main process's.
        A process killed at any moment leaves the earlier checkpoints whole; the newest `keep` up to this step stay.
        """
        self.wait()
        path = self.folder / folder_name(step)
        tensors = {name: t.detach().cpu() if t.device.type == "xla" else t.detach() for name, t in tensors.items()}
        if not self.writes:
            return path
        written = dcp.async_save(
            tensors,
            storage_writer=_Writer(path, {"format": FORMAT, "step": step, **state}, self._prune),
            async_stager=BlockingAsyncStager(),
            process_group=self.group,
            no_dist=self.group is None,
        )
        self._writing = path, written
        return path

    def wait(self) -> None:
        """Until the checkpoint begun last is on the disk.

        A disk that is full or fails is said in the log, and leaves what was there; other errors are raised.
        """
        if self._writing is None:
            return
        (path, written), self._writing = self._writing, None
        try:
            written.result()
        except CheckpointException as failure:
            shutil.rmtree(_unfinished(path), ignore_errors=True)  # all processes have ended their part, and all do this
            errors = [error for error, _ in failure.failures.values()]
            if not all(isinstance(error, OSError) for error in errors):
                raise RuntimeError(f"{path} could not be written: {errors}") from failure
            reason = f"{errors[0]}; training goes on, earlier checkpoints stay"
            log.error("no checkpoint at step %d: %s", int(_NAME.fullmatch(path.name)[1]), reason)

    def mark_best(self, path: Path) -> bool:
        """Keep a checkpoint as `best`, once it is written; False if it was not. The main process calls it."""
        self.wait()
        written = path.is_dir()
        if written:
            self.folder.mkdir(parents=True, exist_ok=True)  # a run that goes on from another's has none of its own yet
            link = self.folder / f"{BEST}.tmp"
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(path, self.folder))
            os.replace(link, self.folder / BEST)
        return written

    def paths(self) -> list[Path]:
        """The run's checkpoints, newest first."""
        found = [(int(m[1]), p) for p in self.folder.glob("step_*") if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def newest_whole(self) -> Path | None:
        """The newest checkpoint that can be read; broken ones are named in the log."""
        for path in self.paths():
            try:
                load_state(path)
                return path
            except CheckpointError as error:
                log.warning("passed over a broken checkpoint: %s", error)
        return None

    def _prune(self, newest: Path) -> None:
        paths, best = self.paths(), self.folder / BEST
        for old in paths[paths.index(newest) :][self.keep :]:
            if not (best.is_symlink() and os.readlink(best) == old.name):
                _remove(old)


def folder_name(step: int) -> str:
    """What the checkpoint of that step is called."""
    return f"step_{step:08d}"


class _Writer(StorageWriter):
    """One safetensors file for each rank in `path`.tmp, then state.json by the coordinator, which renames the folder.

    The header of a file says where in the whole tensor each part belongs, as HuggingFaceStorageReader expects it.
    """

    def __init__(self, path: Path, state: dict, prune):
        self.path, self.folder = path, _unfinished(path)
        self.state = state
        self.prune = prune

    def reset(self, checkpoint_id=None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args, **keywords) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        """The coordinator's: nothing is written before it."""
        for leftover in self.path.parent.glob("step_*.tmp"):
            shutil.rmtree(leftover)
        self.folder.mkdir(parents=True)
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan, planner) -> torch.futures.Future:
        tensors = {item.index.fqn: planner.resolve_data(item).contiguous() for item in plan.items}
        places = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in plan.items}
        done = torch.futures.Future()
        done.set_result([])
        if tensors:
            content = serialize(tensors, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})
            _write_synced(self.folder / plan.storage_data, lambda file: file.write(content))
            record = plan.storage_data, len(content), zlib.crc32(content)
            done = torch.futures.Future()
            done.set_result([WriteResult(item.index, len(content), record) for item in plan.items])
        return done

    def finish(self, metadata, results) -> None:
        """The coordinator's, after all have written: only a folder with its final name is a checkpoint."""
        files = {name: [size, crc] for result in results for name, size, crc in (one.storage_data for one in result)}
        text = json.dumps({**self.state, "files": files})
        _write_synced(self.folder / "state.json", lambda file: file.write(text.encode()))
        _sync_folder(self.folder)
        if self.path.exists():  # of an earlier attempt, which was not whole or went another way
            _remove(self.path)
        os.rename(self.folder, self.path)
        _sync_folder(self.path.parent)
        self.prune(self.path)


def load_state(path: str | Path) -> dict:
    """All of a checkpoint but its tensors.

    Raises CheckpointError when it is missing, truncated, damaged, or not a checkpoint of this program.
    """
    path = Path(path)
    if not path.is_dir():
        kind = "not a folder" if path.exists() else "no such file or folder"
        raise CheckpointError(f"no checkpoint at {path}: {kind}; a run's are in its checkpoints/, the best as best")
    try:
        state = json.loads((path / "state.json").read_text())
        version, files = state["format"], state["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        inside = path / "checkpoints" / "best"
        mend = f"; this is a run's folder, did you mean {inside}?" if inside.exists() else ""
        raise CheckpointError(f"{path} is not a whole checkpoint of vitkernels: state.json: {error}{mend}") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has checkpoint format {version}; this version reads {FORMAT}")
    for name, (size, checksum) in files.items():
        try:
            found = (path / name).stat().st_size, _checksum(path / name)
        except OSError as error:
            raise CheckpointError(f"{path} is not a whole checkpoint: {error}") from error
        if found != (size, checksum):
            what = "wrong checksum" if found[0] == size else f"{found[0]} bytes and not {size}"
            raise CheckpointError(f"{path} is not a whole checkpoint: {name}: {what}")
    return state


def load_tensors(path: str | Path, kind: str, like: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """The checkpoint's tensors whose names begin with `kind`/, by the rest of their names, on the CPU.

    like: where this has a DTensor of that name and shape, only the parts that it holds here are read, as such a
    DTensor.
    """
    reader = HuggingFaceStorageReader(str(path))
    stored: dict[str, TensorStorageMetadata] = reader.read_metadata().state_dict_metadata
    found = {}
    for name, about in stored.items():
        if name.startswith(f"{kind}/"):
            template = (like or {}).get(name.removeprefix(f"{kind}/"))
            dtype = about.properties.dtype
            if isinstance(template, DTensor) and template.shape == about.size:
                found[name] = torch.zeros_like(template, dtype=dtype)
            else:
                found[name] = torch.zeros(about.size, dtype=dtype)
    dcp.load(found, storage_reader=reader, no_dist=True)  # each process reads what it needs
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in found.items()}


def named(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors under the names that `load_tensors` finds them by."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def write_atomically(path: Path, write) -> None:
    """Call `write(file)` on a temporary file beside `path`, sync it, and rename it over `path`."""
    temporary = path.with_name(path.name + ".tmp")
    _write_synced(temporary, write)
    os.replace(temporary, path)
    _sync_folder(path.parent)  # the rename itself must survive a power cut


def export_safetensors(state_dict: dict[str, torch.Tensor], path: Path, notes: dict) -> None:
    """Weights under timm's names as safetensors, replaced in one piece; and what `notes_in` is to find there."""
    metadata = {name: json.dumps(note) for name, note in notes.items()}
    content = serialize({name: t.detach().cpu().contiguous() for name, t in state_dict.items()}, metadata)
    write_atomically(path, lambda file: file.write(content))


def notes_in(path: Path, names: Iterable[str]) -> dict:
    """Those of the notes of these names that an exported file of weights has."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (OSError, SafetensorError):  # torch.save's
        return {}
    return {name: json.loads(metadata[name]) for name in names if name in metadata}


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _remove(path: Path) -> None:
    """Under another name, so that one that is killed meanwhile leaves no checkpoint that is not whole."""
    going = path.with_name(f"{path.name}.old.tmp")  # what is left of it goes when the next one is written
    os.rename(path, going)
    shutil.rmtree(going)


def _write_synced(path: Path, write) -> None:
    """A file that cannot be written is removed at once: where the disk is full, others need its room."""
    try:
        with open(path, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc


# ---- random state: every generator that training draws from ----


def rng_state(runtime) -> torch.Tensor:
    """States of Python's, NumPy's, PyTorch's and the device's generators: JSON, as a tensor of bytes."""
    kind, keys, position, has_gauss, cached = np.random.get_state()
    device = {name: s.tolist() if isinstance(s, torch.Tensor) else s for name, s in runtime.rng_state().items()}
    state = {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state().tolist(),
        "device": device,
    }
    return torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)


def set_rng_state(state: torch.Tensor, runtime) -> None:
    """Restore what `rng_state` returned."""
    state = json.loads(state.numpy().tobytes())
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(torch.tensor(state["torch"], dtype=torch.uint8))
    device = {
        name: torch.tensor(s, dtype=torch.uint8) if isinstance(s, list) else s for name, s in state["device"].items()
    }
    runtime.set_rng_state(device)
