"""Write checkpoints that are complete or absent: folders of safetensors, written during training, then renamed.

    step_00000040/rank_00000.safetensors ...   tensors or shards of them, one file per writing process
    step_00000040/state.json                   everything else, with its checksum and those of the tensor files
    best -> step_00000020                      the best so far, never pruned

torch.distributed.checkpoint writes and reads them, so any number of processes can read what any other number wrote.
There is no pickle: loading a checkpoint executes nothing. Several hosts under torchrun need a shared file system. On a
TPU slice, only the first host writes and reads.
"""

import json
import logging
import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save as serialize
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor

from vitkernels.errors import UsageError
from vitkernels.files import free_bytes, sync_folder, write_synced

log = logging.getLogger(__name__)

FORMAT = 2
BEST = "best"
SPARE_BYTES = 1 << 20  # for the file system's own records and the log
_NAME = re.compile(r"step_(\d{8})")
# A single process has no process group; torch would warn about that at each checkpoint.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class CheckpointError(UsageError):
    """The path holds no complete checkpoint of this program."""


class Checkpoints:
    """The checkpoints of one run: the newest `keep` folders named `step_*`, and `best`.

    Args:
        folder: the run's checkpoint folder; it is created when the first checkpoint is written.
        keep: number of checkpoints to keep, not counting the best.
        group: a process group of all writing processes with a CPU backend, used for nothing else; None for one process.
        writes: whether this process writes.
    """

    def __init__(self, folder: str | Path, keep: int = 2, group=None, writes: bool = True):
        if keep < 1:
            raise UsageError(f"checkpoints.keep must be at least 1, got {keep}", code="checkpoint.keep", keep=keep)
        self.folder = Path(folder)
        self.keep = keep
        self.group = group
        self.writes = writes
        self.unwritten: list[int] = []  # steps whose checkpoints did not fit on the disk
        self._pending: tuple[Path, Future] | None = None

    def save(self, tensors: dict[str, torch.Tensor], state: dict, step: int) -> Path:
        """Start writing the checkpoint of `step` in the background and return its path.

        The tensors are copied before this returns. If the process is killed at any moment, earlier checkpoints stay
        complete. Every process must call it, including those that do not write, because copying sharded tensors takes
        all of them.

        Args:
            tensors: this process's tensors by name, full or as DTensors.
            state: JSON-serializable; only the main process's is written.
            step: number of optimizer steps taken.
        """
        self.wait()
        path = self.folder / folder_name(step)
        tensors = {name: t.detach().cpu() if t.device.type == "xla" else t.detach() for name, t in tensors.items()}
        if not self.writes:
            return path
        future: Future = dcp.async_save(  # type: ignore[assignment]  # this stager gives a plain future
            tensors,
            storage_writer=_Writer(path, {"format": FORMAT, "step": step, **state}, self._make_room, self._prune),
            async_stager=BlockingAsyncStager(),
            process_group=self.group,
            no_dist=self.group is None,
        )
        self._pending = path, future
        return path

    def wait(self) -> None:
        """Wait until the pending checkpoint is on disk.

        If the disk is full or fails, log the error and keep the earlier checkpoints. Other errors are raised.
        """
        if self._pending is None:
            return
        (path, future), self._pending = self._pending, None
        try:
            future.result()
        except CheckpointException as failure:
            shutil.rmtree(_unfinished(path), ignore_errors=True)  # all processes have finished writing by now
            errors = [error for error, _ in failure.failures.values()]
            if not all(isinstance(error, OSError) for error in errors):
                raise RuntimeError(f"{path} could not be written: {errors}") from failure
            step = int(path.name.removeprefix("step_"))
            self.unwritten.append(step)
            log.error("could not write the checkpoint of step %d: %s; training continues", step, errors[0])

    def mark_best(self, path: Path) -> bool:
        """Make `best` point to a checkpoint once it is written; return False if it could not be written.

        Only the main process calls it.
        """
        self.wait()
        written = path.is_dir()
        if written:
            self.folder.mkdir(parents=True, exist_ok=True)  # a run resumed from another folder has none yet
            link = self.folder / f"{BEST}.tmp"
            link.unlink(missing_ok=True)
            link.symlink_to(os.path.relpath(path, self.folder))
            os.replace(link, self.folder / BEST)
            if path in self.paths():  # a run resumed from another folder marks that folder's
                self._prune(path)  # the earlier best may be older than the newest `keep`
        return written

    def paths(self) -> list[Path]:
        """Return the run's checkpoint folders, newest first."""
        found = [(int(m[1]), p) for p in self.folder.glob("step_*") if (m := _NAME.fullmatch(p.name))]
        return [path for _, path in sorted(found, reverse=True)]

    def newest_valid(self) -> Path | None:
        """Return the newest checkpoint that is complete, or None; each broken one is logged."""
        for path in self.paths():
            try:
                load_state(path)
                return path
            except CheckpointError as error:
                log.warning("skipped a broken checkpoint: %s", error)
        return None

    def remove_leftovers(self) -> None:
        """Remove unfinished files of a killed process; the caller must hold the run's lock."""
        _remove_leftovers(self.folder)

    def remove_older(self) -> list[Path]:
        """Remove all checkpoints but the newest and the best, to free space for the final weights; return them."""
        removed = self._removable()
        for path in removed:
            _remove(path)
        return removed

    def reclaimable_bytes(self) -> int:
        """Return the size of the checkpoints that may be removed before the next one is written."""
        return sum(map(folder_bytes, self._removable()))

    def _removable(self) -> list[Path]:
        """Return all but the newest and the best checkpoint, oldest first."""
        best = self.folder / BEST
        name = os.readlink(best) if best.is_symlink() else None
        return [path for path in reversed(self.paths()[1:]) if path.name != name]

    def _make_room(self) -> None:
        """Remove the oldest checkpoints if the disk lacks the space for the next one next to them.

        Assumes that the next one is as large as the newest. The newest and the best are kept. If the newest is broken,
        no checkpoint is removed.
        """
        newest = next(iter(self.paths()), None)
        if newest is None or not (removable := self._removable()):
            return
        needed, removed = folder_bytes(newest) + SPARE_BYTES, []
        if free_bytes(self.folder) >= needed or not _is_valid(newest):
            return
        while removable and free_bytes(self.folder) < needed:
            _remove(removable[0])
            removed.append(removable.pop(0).name)
        log.warning("removed %s: the disk has no room for %d checkpoints", " and ".join(removed), self.keep + 1)

    def _prune(self, newest: Path) -> None:
        paths, best = self.paths(), self.folder / BEST
        for old in paths[paths.index(newest) :][self.keep :]:
            if not (best.is_symlink() and os.readlink(best) == old.name):
                _remove(old)


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def folder_name(step: int) -> str:
    """Return the name of the checkpoint folder of a step."""
    return f"step_{step:08d}"


class _Writer(StorageWriter):
    """Write one safetensors file per rank into `path`.tmp; the coordinator adds state.json and renames the folder.

    Each file's header gives the offsets of its shards in the full tensors, as HuggingFaceStorageReader expects.
    """

    def __init__(self, path: Path, state: dict, make_room: Callable[[], None], prune: Callable[[Path], None]):
        self.path, self.folder = path, _unfinished(path)
        self.state = state
        self.make_room = make_room
        self.prune = prune

    def reset(self, checkpoint_id=None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args, **keywords) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id) -> bool:
        return True

    def prepare_local_plan(self, plan):
        return plan

    def prepare_global_plan(self, plans):
        """Make the folder, on the coordinator, before any process writes."""
        _remove_leftovers(self.path.parent)
        self.make_room()
        self.folder.mkdir(parents=True)
        return [replace(plan, storage_data=f"rank_{rank:05d}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan, planner) -> torch.futures.Future:
        tensors = {item.index.fqn: planner.resolve_data(item).contiguous() for item in plan.items}
        places = {item.index.fqn: {"saved_offsets": list(item.tensor_data.chunk.offsets)} for item in plan.items}
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([])
        if tensors:
            content = serialize(tensors, {"DCP_SHARDING_INFO": json.dumps(places), "format": "pt"})
            write_synced(self.folder / plan.storage_data, lambda file: file.write(content))
            record = plan.storage_data, len(content), zlib.crc32(content)
            done = torch.futures.Future()
            done.set_result([WriteResult(item.index, len(content), record) for item in plan.items])
        return done

    def finish(self, metadata, results) -> None:
        """Rename the folder, on the coordinator, after all processes have written; the rename makes it a checkpoint."""
        files = {name: [size, crc] for result in results for name, size, crc in (one.storage_data for one in result)}
        state = {**self.state, "files": files}
        text = json.dumps({**state, "checksum": _state_checksum(state)})
        write_synced(self.folder / "state.json", lambda file: file.write(text.encode()))
        sync_folder(self.folder)
        if self.path.exists():  # left by an earlier attempt
            _remove(self.path)
        os.rename(self.folder, self.path)
        sync_folder(self.path.parent)
        self.prune(self.path)


def load_state(path: str | Path) -> dict:
    """Return the content of a checkpoint's state.json after checking every file of the checkpoint.

    Raises CheckpointError if the checkpoint is missing, truncated, damaged or of another format; the codes are
    checkpoint.missing, checkpoint.invalid and checkpoint.format.
    """
    path = Path(path)
    if not path.is_dir():
        kind = "it is a file" if path.exists() else "no such file or folder"
        raise CheckpointError(
            f"no checkpoint at {path}: {kind}; a run keeps them in checkpoints/, the best one as checkpoints/best",
            code="checkpoint.missing",
            path=path,
        )
    state = _read_state(path)
    if state["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has checkpoint format {state['format']}; this version reads format {FORMAT}",
            code="checkpoint.format",
            path=path,
            format=state["format"],
        )
    # Checkpoints of older versions have no checksum of their state.
    if state.pop("checksum", None) not in (None, _state_checksum(state)):
        raise _invalid(path, "state.json: wrong checksum")
    named = _NAME.fullmatch(path.resolve().name)
    if named and int(named[1]) != state.get("step"):
        raise _invalid(path, f"it holds step {state.get('step')}: the folder was renamed or its state.json replaced")
    for name, (size, checksum) in state["files"].items():
        try:
            found = (path / name).stat().st_size, _checksum(path / name)
        except OSError as error:
            raise _invalid(path, f"{name}: {error.strerror or error}") from error
        if found != (size, checksum):
            what = "wrong checksum" if found[0] == size else f"{found[0]} bytes instead of {size}"
            raise _invalid(path, f"{name}: {what}")
    return state


def _read_state(path: Path) -> dict:
    """Return the content of a checkpoint folder's state.json, unchecked."""
    try:
        state = json.loads((path / "state.json").read_bytes())
        state["format"], state["files"].items()  # KeyError, TypeError or AttributeError without them
        return state
    except FileNotFoundError as error:
        inside = path / "checkpoints" / "best"
        hint = f"; this is a run's folder, did you mean {inside}?" if inside.exists() else ""
        raise _invalid(path, f"the folder has no state.json{hint}") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or f"it is damaged ({error})"
        raise _invalid(path, f"state.json: {reason}") from error


def _state_checksum(state: dict) -> int:
    """Return the checksum of everything else in state.json, whatever the order of its entries."""
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _is_valid(path: Path) -> bool:
    try:
        load_state(path)
        return True
    except CheckpointError:
        return False


def _invalid(path: Path, reason: str) -> CheckpointError:
    message = f"{path} is not a complete checkpoint of vitkernels: {reason}"
    return CheckpointError(message, code="checkpoint.invalid", path=path, reason=reason)


def load_tensors(path: str | Path, kind: str, like: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """Load the checkpoint's tensors named `kind`/NAME and return them by NAME, on the CPU.

    like: tensors by NAME. If `like` has a DTensor of the same shape, only its local shards are read, into a DTensor.
    """
    reader = HuggingFaceStorageReader(str(path))
    stored = reader.read_metadata().state_dict_metadata
    found = {}
    for name, about in stored.items():
        if name.startswith(f"{kind}/"):
            assert isinstance(about, TensorStorageMetadata), "safetensors hold only tensors"
            template = (like or {}).get(name.removeprefix(f"{kind}/"))
            dtype = about.properties.dtype
            if isinstance(template, DTensor) and template.shape == about.size:
                found[name] = torch.zeros_like(template, dtype=dtype)
            else:
                found[name] = torch.zeros(about.size, dtype=dtype)
    dcp.load(found, storage_reader=reader, no_dist=True)  # each process reads what it needs
    return {name.removeprefix(f"{kind}/"): tensor for name, tensor in found.items()}


def prefixed(kind: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors under the names that `load_tensors` looks for."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def _unfinished(path: Path) -> Path:
    return path.with_name(path.name + ".tmp")


def _remove_leftovers(folder: Path) -> None:
    names = os.listdir(folder) if folder.is_dir() else []
    for leftover in (folder / name for name in names if re.fullmatch(rf"(step_.*|{BEST})\.tmp", name)):
        leftover.unlink() if leftover.is_symlink() else shutil.rmtree(leftover)


def _remove(path: Path) -> None:
    """Rename the folder before deleting it, so that a kill in between leaves no incomplete checkpoint."""
    going = path.with_name(f"{path.name}.old.tmp")  # the next save removes what is left of it
    os.rename(path, going)
    shutil.rmtree(going)


def _checksum(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while piece := file.read(1 << 24):
            crc = zlib.crc32(piece, crc)
    return crc
