"""The folder of a run: who may write to it, which run it holds, whether that run is complete, and where to resume.

Settings are plain dictionaries here, as vitkernels.config.Config.to_dict returns them.
"""

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
import shlex
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from vitkernels.checkpoint.checkpoints import Checkpoints, load_state
from vitkernels.config.groups import OPS
from vitkernels.config.location import program
from vitkernels.config.saved import read_settings
from vitkernels.errors import UsageError
from vitkernels.files import is_disk_error, read_json, write_json
from vitkernels.provenance import code_hash, versions
from vitkernels.registry import tuning_table

log = logging.getLogger(__name__)

# Settings that change how a run executes, not what it computes.
_NOT_IDENTITY = ("resume", "sweep", "checkpoints", "parallel", "logger", "evaluation")
_NAMED_BY_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")  # hydra.run.dir in conf/config.yaml
# Settings that make no difference to a complete run.
_WITHOUT_EFFECT = (
    "trainer.log_every", "trainer.profile", "data.num_workers", "data.cache", "data.cache_gb", "data.patience",
)  # fmt: skip
# In runs of versions without the setting `speed`, ops=eager was the default. All backends compute the same.
_CHANGED_DEFAULTS = ("speed", *(f"ops.{name}" for name in OPS))
# Settings that may change when a run is resumed.
_MAY_CHANGE = (
    *_WITHOUT_EFFECT, "trainer.max_epochs", "trainer.max_steps", "trainer.eval_every", "trainer.warmup_steps",
    "data.root", "runtime", "compile",
    "data.batch_size", "trainer.accum_steps",  # the checkpoint contains their product, the images per step
)  # fmt: skip
_NOT_IN_OLDER = ("model_arguments",)  # entries that checkpoints of older versions do not have
_ELSEWHERE = "hydra.run.dir=FOLDER puts this run elsewhere"


class FolderInUseError(UsageError):
    """Another process runs in the folder; nothing in it may be touched."""


# ---- which run ----


def identity(settings: dict) -> dict:
    """Return the settings that decide what a run computes."""
    kept = {key: value for key, value in settings.items() if key not in _NOT_IDENTITY}
    if not (kept.get("distill") or {}).get("teacher"):
        kept.pop("distill", None)  # runs of earlier versions have no such group
    return kept


def circumstances(settings: dict) -> dict:
    """Return everything that can change a run's figures, step times included: settings, code and package versions.

    Of the sweep's settings only `slots` counts: the number of jobs that share the machine.
    """
    settings = {key: value for key, value in settings.items() if key != "resume"}
    settings["sweep"] = {"slots": settings["sweep"]["slots"]}
    table = tuning_table.user_table()  # decides what `auto` chooses
    tuned = hashlib.sha256(table.read_bytes()).hexdigest()[:8] if table.is_file() else None
    return json.loads(json.dumps({**settings, "code": code_hash(), "versions": versions(), "tuned": tuned}))


def differences(before: dict, now: dict, may_change: tuple[str, ...] = (), prefix: str = "") -> list[str]:
    """Return the settings that differ and may not, one sentence each."""
    if not prefix and "mode" in before and "speed" not in before:
        may_change += _CHANGED_DEFAULTS
    found = []
    for key in sorted({*before, *now}):
        a, b, name = before.get(key), now.get(key), f"{prefix}{key}"
        if a == b or name in may_change:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, may_change, f"{name}.")
        else:
            found.append(f"{name} was {a!r} and is now {b!r}")
    return found


# ---- complete, failed, taken ----


def is_complete(folder: Path) -> bool:
    """Return whether the folder holds a run that reached its last step."""
    return (read_json(folder / "summary.json") or {}).get("status") == "done"


def holds_run(folder: Path) -> bool:
    """Return whether the folder holds results of a run that must not be overwritten."""
    log_file = folder / "metrics.jsonl"
    logged = log_file.exists() and log_file.stat().st_size > 0
    return logged or is_complete(folder) or any((folder / "checkpoints").glob("step_*"))


def find_complete(folder: Path, settings: dict) -> Path | None:
    """Return the folder where a run with these settings is already complete: `folder`, or the newest one next to it.

    Its losses are those of this run. Its step times may differ; see `circumstances`.
    """
    if settings["mode"] == "eval":
        return folder if _is_evaluated(folder / "eval.json", settings) else None
    newest = [folder] if holds_run(folder) else _same_runs_nearby(folder, settings)
    if not newest or not is_complete(newest[0]):
        return None
    return None if differences(read_settings(newest[0]), identity(settings), _WITHOUT_EFFECT) else newest[0]


def _is_evaluated(file: Path, settings: dict) -> bool:
    """Return whether the file holds an evaluation of these weights, unchanged since then."""
    evaluated, checkpoint = read_json(file), settings["checkpoint"]
    if evaluated is None or checkpoint is None or not Path(checkpoint).exists():
        return False
    weights = Path(checkpoint)
    changed = max(weights.lstat().st_mtime, weights.stat().st_mtime)  # checkpoints/best is a link
    same = not differences(evaluated.get("settings", {}), identity(settings), _WITHOUT_EFFECT)
    return same and changed < file.stat().st_mtime


def read_results(folder: Path) -> dict:
    """Return the figures of a run, or of an evaluation under the same names; {} if there are none."""
    summary, evaluated = read_json(folder / "summary.json"), read_json(folder / "eval.json")
    if summary is not None or evaluated is None:
        return summary or {}
    return {
        f"val_{name}" if name in ("top1", "top5", "loss", "map") else name: value for name, value in evaluated.items()
    }


def record_failure(folder: Path, reason: str) -> None:
    """Write the reason of a failure to summary.json, unless the run is complete."""
    if not is_complete(folder):
        try:
            write_json(folder / "summary.json", {"status": "failed", "reason": reason})
        except OSError as error:  # the run's own error matters more than this one
            log.error("%s/summary.json could not be written: %s", folder, error)


class FailureRecord:
    """Write the reason of a failure into the run's folder, if the folder is this run's.

    A context manager for the entire run. `owned` is initially true if the folder holds no run, and the caller sets it
    once the folder is claimed. A folder that belongs to another run is never changed.
    """

    def __init__(self, folder: Path, is_main: bool):
        self.folder, self.is_main = folder, is_main
        self.owned = not holds_run(folder)

    def __enter__(self) -> "FailureRecord":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        failed = isinstance(error, Exception) and not isinstance(error, FolderInUseError) and not is_disk_error(error)
        if failed and self.owned and self.is_main:
            record_failure(self.folder, str(error) or type(error).__name__)


# ---- claiming a folder ----


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the folder for this process until the context or the process ends, however it ends.

    Two processes in one folder, such as a job that is restarted while it still runs, would delete each other's
    checkpoints. Raises FolderInUseError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # data workers do not inherit this lock
        except (BlockingIOError, PermissionError):
            file.seek(0)
            holder = file.read().strip() or "just started"
            raise FolderInUseError(
                f"another process ({holder}) is running in {folder}. Wait until it ends or stop it, then start this "
                f"again; {_ELSEWHERE}",
                code="run.folder_in_use",
                holder=holder,
            ) from None
        except OSError as error:
            log.warning("cannot lock %s (%s): make sure that no other process runs in it", folder, error)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def claim(folder: Path, settings: dict) -> tuple[Path, bool]:
    """Return (folder, False) if this run may write to `folder`, or (folder of the complete run, True).

    Raises UsageError if the folder holds a run that this one would overwrite, and CheckpointError if the path to resume
    does not exist, before data and model are built.
    """
    if settings["mode"] != "train":
        return folder, False
    if settings["resume"] not in (None, "auto") and not Path(settings["resume"]).exists():
        load_state(settings["resume"])  # raises CheckpointError
    complete = find_complete(folder, settings) if settings["resume"] == "auto" else None
    if complete is not None:
        return complete, True
    _refuse_to_overwrite(folder, settings)
    return folder, False


def _refuse_to_overwrite(folder: Path, settings: dict) -> None:
    if not holds_run(folder):
        return
    if settings["resume"] is None:
        raise UsageError(
            f"{folder} already holds a run, which would be overwritten. resume=auto resumes it; {_ELSEWHERE}",
            code="run.folder_taken",
        )
    before, now = read_settings(folder), identity(settings)
    if not before:
        raise UsageError(
            f"{folder}/config.json is missing or damaged, so this run's settings cannot be compared with those of the "
            f"run in it{started_with(folder)}. Restore the file, or continue in another folder: resume={folder} "
            "hydra.run.dir=FOLDER",
            code="run.config_lost",
        )
    complete = is_complete(folder) and _length(before) == _length(now)
    changed = differences(before, now, _WITHOUT_EFFECT if complete else _MAY_CHANGE)
    command = started_with(folder)
    if changed and complete:
        raise UsageError(
            f"{folder} holds a complete run with other settings: {'; '.join(changed)}{command}. {_ELSEWHERE}; in a "
            "sweep, sweep.rerun=true runs it again",
            code="run.settings_differ",
            differences=changed,
        )
    if changed:
        raise UsageError(
            f"{folder} holds a run with other settings: {'; '.join(changed)}{command}. {_ELSEWHERE}",
            code="run.settings_differ",
            differences=changed,
        )


def started_with(folder: Path) -> str:
    """Return "; it was started with: COMMAND" for messages, or "last continued with"; "" for runs of older versions."""
    commands = read_json(folder / "command.json") or {}
    command, how = commands.get("continued_with"), "last continued"
    if not isinstance(command, str):
        command, how = commands.get("command"), "started"
    return f"; it was {how} with: {command}" if isinstance(command, str) else ""


def _length(settings: dict) -> tuple:
    trainer = settings.get("trainer", {})
    steps = trainer.get("max_steps")
    return ("epochs", trainer.get("max_epochs")) if steps is None else ("steps", steps)


def begin(folder: Path, settings: dict, resumed: bool, notes: dict) -> None:
    """Record this run's settings in the folder. This is the first change to the folder.

    notes: class_names and preprocessing (see checkpoint.trained_on), each written to a file of its name unless None.
    If a complete run is extended, its earlier summary is kept under another name. Raises UsageError if such a run
    has no checkpoint to resume from.
    """
    if not is_complete(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # of an attempt that failed
    elif resumed:
        steps = (read_json(folder / "summary.json") or {})["steps"]
        (folder / "summary.json").rename(_summary_of_length(folder, steps))
    else:
        raise UsageError(
            f"{folder} holds a complete run without checkpoints, which cannot be extended; {_ELSEWHERE}",
            code="run.no_checkpoint",
        )
    write_json(folder / "config.json", identity(settings))
    command = shlex.join([*program(), *sys.argv[1:]])
    started = (read_json(folder / "command.json") or {}).get("command") if resumed else None
    # The first command tells what the run does, and the last one with which settings it continues.
    write_json(
        folder / "command.json",
        {"command": command} if started is None else {"command": started, "continued_with": command},
    )
    for name, content in notes.items():
        if content is not None:
            write_json(folder / f"{name}.json", content)


def restore_summary(folder: Path, settings: dict, steps: int) -> bool:
    """Restore the summary that the run had at exactly this length; return whether it was complete at that length."""
    aside = _summary_of_length(folder, steps)
    if aside.exists():
        aside.rename(folder / "summary.json")
        write_json(folder / "config.json", identity(settings))
    return is_complete(folder)


def _summary_of_length(folder: Path, steps: int) -> Path:
    return folder / f"summary_{steps}_steps.json"


# ---- resuming ----


def find_checkpoint(folder: Path, settings: dict, checkpoints: Checkpoints) -> Path | None:
    """Return the checkpoint that `resume` selects; None starts from scratch.

    resume=auto takes the newest complete checkpoint of this folder or, if folders are named by time, of the newest run
    with the same settings next to it; broken checkpoints are logged and skipped. resume=PATH takes that checkpoint, or
    the newest complete one of that run folder, and nothing else.
    """
    resume = settings["resume"]
    if resume is None:
        return None
    if resume != "auto":
        return _requested(Path(resume), checkpoints)
    found = checkpoints.newest_valid()
    if found is not None:
        return found
    for run in _same_runs_nearby(folder, settings):
        found = Checkpoints(run / "checkpoints").newest_valid()
        if found is not None:
            return found
    log.info("resume=auto: this run has no checkpoint, starting from scratch")
    return None


def _requested(resume: Path, own: Checkpoints) -> Path:
    path: Path | None = resume
    if resume.name == "checkpoints" or (resume / "checkpoints").is_dir():
        path = Checkpoints(resume if resume.name == "checkpoints" else resume / "checkpoints").newest_valid()
        if path is None:
            raise UsageError(f"resume={resume}: no complete checkpoint in that folder", code="run.no_checkpoint")
    assert path is not None
    newest = own.newest_valid()
    if newest is not None and load_state(newest)["step"] > load_state(path)["step"]:
        raise UsageError(
            f"{own.folder} has checkpoints newer than {path}, which would be overwritten; resume=auto continues from "
            "the newest, and hydra.run.dir=FOLDER branches off into another folder",
            code="run.newer_checkpoints",
        )
    return path


def _same_runs_nearby(folder: Path, settings: dict) -> list[Path]:
    """Return runs with the same settings in the parent folder that have checkpoints, newest first.

    Only folders named by time are searched, as runs get them by default. A folder named by hand is used as given.
    """
    if not _NAMED_BY_TIME.fullmatch(folder.name):
        return []
    runs = [p.parent for p in folder.parent.glob("*/checkpoints") if p.parent != folder]
    runs = [run for run in runs if _NAMED_BY_TIME.fullmatch(run.name) and read_settings(run) == identity(settings)]
    return sorted(runs, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, reverse=True)


def check_same_run(path: Path, state: dict, expected: dict, total_steps: int) -> None:
    """Raise UsageError if the checkpoint's identifying entries differ from `expected` or it is past `total_steps`."""
    expected = {k: v for k, v in expected.items() if k in state or k not in _NOT_IN_OLDER}
    wrong = {k: f"{k} was {state.get(k)!r} and is now {v!r}" for k, v in expected.items() if state.get(k) != v}
    if wrong:
        hint = " (data.batch_size is per device, so it changes with the number of devices)"
        raise UsageError(
            f"{path} cannot be resumed by this run: {'; '.join(wrong.values())}{started_with(path.parent.parent)}. "
            "Use the settings of that run"
            f"{hint if 'images_per_step' in wrong else ''}, or start a new run from its weights with checkpoint=PATH",
            code="run.checkpoint_mismatch",
            entries=sorted(wrong),
        )
    if state["step"] > total_steps:
        raise UsageError(
            f"{path} is at step {state['step']}, but the run has {total_steps} steps; use a longer trainer.max_steps "
            "or trainer.max_epochs, or an earlier checkpoint",
            code="run.past_end",
            step=state["step"],
            total_steps=total_steps,
        )
