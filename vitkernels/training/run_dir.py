"""One run, one folder: whose it is, whether it is finished, and where to go on from."""

import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import socket
from collections.abc import Iterator
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from timm.utils import natural_key

from vitkernels.checkpoint import checkpoints as ckpt
from vitkernels.errors import UsageError
from vitkernels.provenance import code_hash, versions
from vitkernels.registry import tuning_table

log = logging.getLogger(__name__)

# Settings that steer how a run is carried out and not what it computes.
_NOT_IDENTITY = ("resume", "sweep", "checkpoints", "parallel")
_BY_TIME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d")  # hydra.run.dir in conf/config.yaml
# Settings that do not matter to a finished run,
_WITHOUT_EFFECT = ("trainer.log_every", "trainer.profile", "data.num_workers")
# and those that may change between one part of a run and the next.
_MAY_CHANGE = (
    *_WITHOUT_EFFECT, "trainer.max_epochs", "trainer.max_steps", "trainer.eval_every", "trainer.warmup_steps",
    "data.root", "runtime", "compile",
    "data.batch_size", "trainer.accum_steps",  # but not the images of a step: the checkpoint knows them
)  # fmt: skip


def read_json(path: Path) -> dict | None:
    """The JSON object in a file; None when it is missing or torn."""
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None


def write_json(path: Path, content) -> None:
    """Replace the file in one piece."""
    path.parent.mkdir(parents=True, exist_ok=True)
    ckpt.write_atomically(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))


def identity(cfg: DictConfig) -> dict:
    """What a run computes, as plain values."""
    plain = OmegaConf.to_container(cfg, resolve=True)
    return {key: value for key, value in plain.items() if key not in _NOT_IDENTITY}


def circumstances(cfg: DictConfig) -> dict:
    """All that can change a run's figures, step times included, as plain values: settings, code, packages.

    Of `sweep` the jobs at once, which share the machine.
    """
    settings = OmegaConf.to_container(cfg, resolve=True)
    settings = {key: value for key, value in settings.items() if key != "resume"}
    settings["sweep"] = {"slots": settings["sweep"]["slots"]}
    table = tuning_table.user_table()  # what `auto` goes by
    tuned = hashlib.sha256(table.read_bytes()).hexdigest()[:8] if table.is_file() else None
    return json.loads(json.dumps({**settings, "code": code_hash(), "versions": versions(), "tuned": tuned}))


def _settings_of(folder: Path) -> dict:
    """The identity of the run in the folder; empty when there is none."""
    settings = read_json(folder / "config.json") or {}
    target = settings.get("data", {}).get("_target_", "")
    if target.startswith("data."):  # before the data sets were part of the package
        settings["data"]["_target_"] = f"vitkernels.{target}"
    # What was always so, until it could be set.
    if "schedule" in settings:
        settings["schedule"].setdefault("warmup_cap", 0.1)
    if "crop_pct" in settings.get("data", {}):
        settings["data"].setdefault("crop_mode", "center")
    return settings


def is_done(folder: Path) -> bool:
    return (read_json(folder / "summary.json") or {}).get("status") == "done"


def find_done(folder: Path, cfg: DictConfig) -> Path | None:
    """The folder of this very run when it is finished: `folder`, or the newest run of this configuration beside it.

    Its losses are this run's; its step times need not be: `circumstances`.
    """
    if cfg.mode == "eval":
        return folder if _is_evaluated(folder / "eval.json", cfg) else None
    newest = [folder] if is_taken(folder) else _same_runs_beside(folder, cfg)
    if newest and is_done(newest[0]) and not differences(_settings_of(newest[0]), identity(cfg), _WITHOUT_EFFECT):
        return newest[0]
    return None


def _is_evaluated(file: Path, cfg: DictConfig) -> bool:
    """Whether the file has the figures of these very weights: of what lay at that path then, and has not changed."""
    evaluated = read_json(file)
    if evaluated is None or cfg.checkpoint is None or not Path(cfg.checkpoint).exists():
        return False
    weights = Path(cfg.checkpoint)
    changed = max(weights.lstat().st_mtime, weights.stat().st_mtime)  # checkpoints/best is a link
    same = not differences(evaluated.get("settings", {}), identity(cfg), _WITHOUT_EFFECT)
    return same and changed < file.stat().st_mtime


def read_results(folder: Path) -> dict:
    """The figures of a run, or where nothing was trained of an evaluation under the same names; empty without any."""
    summary, evaluated = read_json(folder / "summary.json"), read_json(folder / "eval.json")
    if summary is not None or evaluated is None:
        return summary or {}
    return {f"val_{name}" if name in ("top1", "top5", "loss") else name: value for name, value in evaluated.items()}


class InUseError(UsageError):
    """Another process is at work in the folder, and nothing in it may be touched."""


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Keeps other processes from running in this folder, until the end of this one at the latest, however it ends.

    Two at once (a job started again while it still runs) would delete each other's checkpoints. Raises InUseError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / ".lock", "a+") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # of this process alone: data workers do not inherit it
        except (BlockingIOError, PermissionError):
            file.seek(0)
            raise InUseError(
                f"another process ({file.read().strip() or 'just started'}) is running in {folder}. Let it end or stop "
                "it, then start this again; hydra.run.dir=FOLDER puts this run elsewhere"
            ) from None
        except OSError as error:
            log.warning("%s cannot be locked (%s): nothing else may run in it meanwhile", folder, error)
        file.truncate(0)
        file.write(f"{os.getpid()} on {socket.gethostname()}\n")
        file.flush()
        yield


def open_for(folder: Path, cfg: DictConfig) -> tuple[Path, bool]:
    """(the folder to write to, False), which is free for this run; or with True the one where it is already finished.

    Raises UsageError when the folder holds a run that this one would overwrite.
    """
    if cfg.mode != "train":
        return folder, False
    done = find_done(folder, cfg) if cfg.resume == "auto" else None
    if done is not None:
        return done, True
    _refuse_to_overwrite(folder, cfg)
    return folder, False


def _refuse_to_overwrite(folder: Path, cfg: DictConfig) -> None:
    if not is_taken(folder):
        return
    elsewhere = "hydra.run.dir=FOLDER puts this run elsewhere"
    if cfg.resume is None:
        raise UsageError(
            f"{folder} already holds a run, which would be overwritten. resume=auto goes on with it; {elsewhere}"
        )
    before, now = _settings_of(folder), identity(cfg)
    finished = is_done(folder) and _length(before) == _length(now)
    changed = differences(before, now, _WITHOUT_EFFECT if finished else _MAY_CHANGE)
    if changed and finished:
        elsewhere += "; in a sweep, sweep.rerun=true makes its runs anew"
        raise UsageError(
            f"{folder} holds a run that was finished with other settings: {'; '.join(changed)}. {elsewhere}"
        )
    if changed:
        raise UsageError(f"{folder} holds a run with other settings: {'; '.join(changed)}. {elsewhere}")


def _length(settings: dict) -> tuple:
    trainer = settings.get("trainer", {})
    steps = trainer.get("max_steps")
    return ("epochs", trainer.get("max_epochs")) if steps is None else ("steps", steps)


def begin(folder: Path, cfg: DictConfig, resumed: bool, **learned) -> None:
    """Note in the folder which run it is from now on, and what `learned_from` is to tell. Nothing was changed before.

    The summary of a finished run that is made longer is set aside: it is not about that length.
    Raises UsageError where such a run would have to begin anew.
    """
    if not is_done(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # of an attempt that failed
    elif resumed:
        steps = read_json(folder / "summary.json")["steps"]
        (folder / "summary.json").rename(_summary_of_length(folder, steps))
    else:
        raise UsageError(
            f"{folder} holds a finished run without checkpoints, which cannot be made longer; "
            "hydra.run.dir=FOLDER puts this run elsewhere"
        )
    write_json(folder / "config.json", identity(cfg))
    for name, content in learned.items():
        if content is not None:
            write_json(folder / f"{name}.json", content)


def take_summary_back(folder: Path, cfg: DictConfig, steps: int) -> bool:
    """Whether the run was finished at this very length before; then its summary is in its place again."""
    aside = _summary_of_length(folder, steps)
    if aside.exists():
        aside.rename(folder / "summary.json")
        write_json(folder / "config.json", identity(cfg))
    return is_done(folder)


def _summary_of_length(folder: Path, steps: int) -> Path:
    return folder / f"summary_{steps}_steps.json"


def is_taken(folder: Path) -> bool:
    """Whether there is anything of a run in the folder that must not be lost."""
    log_file = folder / "metrics.jsonl"
    logged = log_file.exists() and log_file.stat().st_size > 0
    return logged or is_done(folder) or any((folder / "checkpoints").glob("step_*"))


def differences(before: dict, now: dict, may_change: tuple[str, ...] = (), prefix: str = "") -> list[str]:
    """The settings that differ and may not, as sentences."""
    found = []
    for key in sorted({*before, *now}):
        a, b, name = before.get(key), now.get(key), f"{prefix}{key}"
        if a == b or name in may_change:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            found += differences(a, b, may_change, f"{name}.")
        else:
            found.append(f"{name} is {a!r} there and {b!r} here")
    return found


def find_checkpoint(folder: Path, cfg: DictConfig, checkpoints: ckpt.Checkpoints) -> Path | None:
    """The checkpoint that `resume` asks for; None to start from nothing.

    resume=auto looks in this run's folder, then (where folders are named by time) in runs of the same configuration
    beside it, and takes the newest whole checkpoint; broken ones are passed over with a line in the log.
    resume=PATH takes that checkpoint, or the newest whole checkpoint of that run folder, and nothing else.
    """
    if cfg.resume is None:
        return None
    if cfg.resume != "auto":
        return _asked_for(Path(cfg.resume), checkpoints)
    found = checkpoints.newest_whole()
    if found is not None:
        return found
    for run in _same_runs_beside(folder, cfg):
        found = ckpt.Checkpoints(run / "checkpoints").newest_whole()
        if found is not None:
            return found
    log.info("resume=auto: no checkpoint of this run, starting from the beginning")
    return None


def _asked_for(asked: Path, own: ckpt.Checkpoints) -> Path:
    path = asked
    if asked.name == "checkpoints" or (asked / "checkpoints").is_dir():
        path = ckpt.Checkpoints(asked if asked.name == "checkpoints" else asked / "checkpoints").newest_whole()
        if path is None:
            raise UsageError(f"resume={asked}: no whole checkpoint in that folder")
    newest = own.newest_whole()
    if newest is not None and ckpt.load_state(newest)["step"] > ckpt.load_state(path)["step"]:
        raise UsageError(
            f"{own.folder} has checkpoints newer than {path}, which going back would overwrite; resume=auto goes on "
            "from them, and hydra.run.dir=FOLDER branches off into another folder"
        )
    return path


_LEARNED = ("class_names", "preprocessing")


def learned_from(weights: Path) -> dict:
    """What a run's checkpoint, or its exported weights, learned from; an entry is None where it is not known.

    class_names: what the outputs stand for, in order. preprocessing: how images were prepared (models.preprocessing).
    """
    if weights.is_dir():
        notes, run = read_json(weights / "state.json") or {}, weights.resolve().parent.parent
    else:
        notes, run = ckpt.notes_in(weights, _LEARNED), weights.parent
    return {**_learned_in(run), **{name: notes[name] for name in _LEARNED if name in notes}}


def _learned_in(run: Path) -> dict:
    """What the folder says of a run whose weights do not say it themselves, as they have not always done."""
    data = _settings_of(run).get("data", {})
    prepared = {name: data.get(name) for name in ("mean", "std", "interpolation", "crop_pct", "crop_mode")}
    known = prepared if None not in prepared.values() else None
    return {"class_names": read_json(run / "class_names.json"), "preprocessing": known}


def check_data(weights: str | Path, theirs: dict, class_names: list[str] | None, preprocessing: dict | None) -> None:
    """Raise UsageError where weights that learned from `theirs` know other classes, and warn of otherwise prepared
    images."""
    known, prepared = theirs["class_names"], theirs["preprocessing"]
    if None not in (known, class_names) and known != class_names:
        pairs = itertools.zip_longest(known, class_names, fillvalue="none")
        number, (there, here) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        raise UsageError(
            f"{weights} has learned other classes than the data set has: number {number} is {there!r} there and "
            f"{here!r} here. Give the data set that it was trained on, or train on from it: checkpoint=PATH begins a "
            "head anew"
        )
    if None not in (prepared, preprocessing):
        there = {name: prepared.get(name) for name in preprocessing}
        for difference in differences(there, preprocessing, prefix="data."):
            log.warning("%s learned from images that were prepared otherwise: %s", weights, difference)


def name_order_of_timm(weights: str | Path, outputs: int, ours: list[str] | None) -> None:
    """Warn where weights that are no run's may have learned these classes, as many as outputs, in another order."""
    in_order = sorted(ours or [], key=natural_key)
    if outputs == len(in_order) and in_order != (ours or []):
        number = next(i for i, pair in enumerate(zip(in_order, ours, strict=True)) if pair[0] != pair[1])
        log.warning(
            "if timm trained %s on these folders, its class number %d is %r and here it is %r: timm has 2 before 10, "
            "and a beside A. Folders of one case with leading zeros (02, 10) have the same order in both",
            *(weights, number, in_order[number], ours[number]),
        )


def _same_runs_beside(folder: Path, cfg: DictConfig) -> list[Path]:
    """Runs of the same configuration in the folder's parent that have checkpoints, newest first.

    Only among folders named by their time, as runs get them by default: a folder that was named by hand is meant.
    """
    if not _BY_TIME.fullmatch(folder.name):
        return []
    runs = [p.parent for p in folder.parent.glob("*/checkpoints") if p.parent != folder]
    runs = [run for run in runs if _BY_TIME.fullmatch(run.name) and _settings_of(run) == identity(cfg)]
    return sorted(runs, key=lambda run: (run / "checkpoints").stat().st_mtime_ns, reverse=True)


def refuse_other_run(path: Path, state: dict, expected: dict, total_steps: int) -> None:
    """Raise UsageError when a checkpoint's identifying entries are not the expected, or it is past `total_steps`."""
    wrong = {k: f"{k} is {state.get(k)!r} there and {v!r} here" for k, v in expected.items() if state.get(k) != v}
    if wrong:
        hint = " (data.batch_size is for each device: another number of them takes another one)"
        raise UsageError(
            f"{path} cannot be continued by this run: {'; '.join(wrong.values())}. Give the settings it was made with"
            f"{hint if 'images_per_step' in wrong else ''}, or start anew from its weights alone with checkpoint=PATH"
        )
    if state["step"] > total_steps:
        raise UsageError(
            f"{path} is at step {state['step']}, and {total_steps} are asked for: a run cannot end before that"
        )


def note_failure(folder: Path, reason: str) -> None:
    """Leave a summary.json that says why there is no result, unless there is one."""
    if not is_done(folder):
        try:
            write_json(folder / "summary.json", {"status": "failed", "reason": reason})
        except OSError as error:  # the reason is what has to be seen, and not what this disk does besides
            log.error("%s/summary.json could not be written: %s", folder, error)
