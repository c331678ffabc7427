"""One run, one folder: whose it is, whether it is finished, and where to go on from."""

import json
import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from vitkernels.errors import UsageError
from vitkernels.training import checkpoint as ckpt

log = logging.getLogger(__name__)

# Settings that steer how a run is carried out and not what it computes.
_NOT_IDENTITY = ("resume", "sweep", "checkpoints")


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


def is_same_run(folder: Path, cfg: DictConfig) -> bool:
    """Whether the run in `folder` was started by this configuration."""
    return read_json(folder / "config.json") == identity(cfg)


def is_done(folder: Path) -> bool:
    return (read_json(folder / "summary.json") or {}).get("status") == "done"


def claim(folder: Path, cfg: DictConfig) -> None:
    """Note in the folder which run it is; refuse one that holds an earlier run, unless that is to be resumed."""
    taken = any((folder / name).exists() for name in ("summary.json", "metrics.jsonl", "checkpoints"))
    if taken and cfg.resume is None:
        raise UsageError(
            f"{folder} already holds a run, which would be overwritten. resume=auto goes on with it; "
            "hydra.run.dir=FOLDER puts this run elsewhere"
        )
    write_json(folder / "config.json", identity(cfg))


def find_checkpoint(folder: Path, cfg: DictConfig, checkpoints: ckpt.Checkpoints) -> tuple[Path, dict] | None:
    """The checkpoint that `resume` asks for, with its content; None to start from nothing.

    resume=auto looks in this run's folder, then in unfinished runs of the same configuration beside it, and takes the
    newest whole checkpoint; broken ones are passed over with a line in the log. resume=PATH takes that file, or the
    newest whole checkpoint of that run folder, and nothing else.
    """
    if cfg.resume is None:
        return None
    if cfg.resume != "auto":
        path = Path(cfg.resume)
        if not path.is_dir():
            return path, ckpt.load(path)
        found = ckpt.Checkpoints(path if path.name == "checkpoints" else path / "checkpoints").newest_whole()
        if found is None:
            raise UsageError(f"resume={path}: no whole checkpoint in that folder")
        return found
    found = checkpoints.newest_whole()
    if found is not None:
        return found
    for run in _unfinished_beside(folder, cfg):
        found = ckpt.Checkpoints(run / "checkpoints").newest_whole()
        if found is not None:
            return found
    log.info("resume=auto: no checkpoint of this run, starting from the beginning")
    return None


def _unfinished_beside(folder: Path, cfg: DictConfig) -> list[Path]:
    """Unfinished runs of the same configuration in the folder's parent, newest first."""
    runs = [p.parent for p in folder.parent.glob("*/checkpoints") if p.parent != folder]
    runs = [run for run in runs if not is_done(run) and is_same_run(run, cfg)]
    return sorted(runs, key=lambda run: (run / "checkpoints").stat().st_mtime, reverse=True)


def refuse_other_run(path: Path, state: dict, expected: dict) -> None:
    """Raise UsageError when a checkpoint's identifying entries are not the expected ones."""
    wrong = [f"{k} is {state.get(k)!r} there and {v!r} here" for k, v in expected.items() if state.get(k) != v]
    if wrong:
        raise UsageError(
            f"{path} cannot be continued by this run: {'; '.join(wrong)}. Give the settings it was made with, "
            "or start anew from its weights alone with checkpoint=PATH"
        )


def load_optimizer(optimizer, state: dict, path: Path) -> None:
    """Restore an optimizer; UsageError when the state is of differently grouped parameters."""
    try:
        optimizer.load_state_dict(state)
    except (ValueError, KeyError) as error:
        raise UsageError(
            f"the optimizer state in {path} does not fit: {error}. Give the optim.* settings it was made with, "
            "or start anew from its weights alone with checkpoint=PATH"
        ) from error


def note_failure(folder: Path, reason: str) -> None:
    """Leave a summary.json that says why there is no result, unless there is one."""
    if not is_done(folder):
        write_json(folder / "summary.json", {"status": "failed", "reason": reason})
