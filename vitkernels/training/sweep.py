"""`python train.py -m ...`: each job in a process of its own, and one verdict table at the end.

A kernel that faults takes its process with it (on a GPU it poisons the whole CUDA context), so jobs never share one.
"""

import hashlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitkernels.bench import comparison
from vitkernels.environment import git_commit
from vitkernels.training.run_folder import is_done, is_same_run, read_json, write_json
from vitkernels.training.signals import EXIT_INTERRUPTED

log = logging.getLogger(__name__)


def name_sweep(argv: list[str]) -> list[str]:
    """The command line with a folder for its sweep: the same sweep gets the same folder, so it can be continued.

    Folders are named by what is swept (runs/sweeps/attn-1a2b3c4d/attn=sdpa); an own hydra.sweep.dir is left alone.
    """
    if not {"-m", "--multirun"} & set(argv):
        return argv
    words = [word for word in argv[1:] if "=" in word and not word.startswith("-")]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException:
        return argv  # Hydra reports it better
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    fixed = [o.key_or_group for o in overrides if not o.is_sweep_override()]
    added = []
    if swept and fixed:
        added.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    if not any(word.split("=")[0] == "hydra.sweep.dir" for word in words):
        deciding = sorted(word for word in words if not word.startswith(("sweep.", "resume=")))
        digest = hashlib.sha256("\0".join(deciding).encode()).hexdigest()[:8]
        name = "-".join([*(key.replace("/", ".") for key in swept), digest])
        added.append(f"hydra.sweep.dir=runs/sweeps/{name}")
    return [*argv, *added]


def is_sweep_job() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def run_job(config: DictConfig) -> float | None:
    """Run one job of a sweep as `python train.py <its overrides>`; returns what a sweeper may optimise.

    A failure is logged at once and noted in the job's folder for the verdict table; it never raises, so that the
    sweep goes on. A job that is already done with the same configuration is skipped.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    variant = hydra.job.override_dirname or "default"
    job = {"num": hydra.job.num, "variant": variant, "overrides": list(hydra.overrides.task)}
    if is_done(folder) and is_same_run(folder, config) and not config.sweep.rerun:
        log.info("%s: done before, skipped (%s; sweep.rerun=true runs it again)", variant, _measured_with(folder))
        write_json(folder / "job.json", {**job, "status": "done"})
        return _objective(folder, config)
    if config.sweep.rerun:
        _clear(folder)
    elif not is_done(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # an earlier failure's reason is not this one's
    code, last_words, stopped = _run_in_own_process(folder, config, list(hydra.overrides.task))
    if code == EXIT_INTERRUPTED or (stopped and code != 0):
        write_json(folder / "job.json", {**job, "status": "failed", "reason": "interrupted"})
    elif code != 0:
        reason = _reason(folder, code, last_words)
        write_json(folder / "job.json", {**job, "status": "failed", "reason": reason})
        log.error("%s failed: %s", variant, reason)
    else:
        write_json(folder / "job.json", {**job, "status": "done"})
    if stopped or code == EXIT_INTERRUPTED:
        log.error("interrupted; the same command continues the sweep")
        sys.exit(EXIT_INTERRUPTED)
    return _objective(folder, config) if code == 0 else None


def _measured_with(folder: Path) -> str:
    """With which code the figures in the folder were made, beside the code that is here now."""
    then, now = (read_json(folder / "summary.json") or {}).get("git_commit"), git_commit()
    return f"measured at commit {then}" + ("" if then == now else f", and this is {now}")


def _objective(folder: Path, config: DictConfig) -> float | None:
    summary = read_json(folder / "summary.json") or {}
    value = OmegaConf.select(OmegaConf.create(summary), config.sweep.objective)
    return None if value is None else float(value)


def _clear(folder: Path) -> None:
    """Remove an earlier attempt's results, but not Hydra's files of this one."""
    for path in folder.iterdir():
        if path.name == ".hydra" or path.suffix == ".log":
            continue
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _run_in_own_process(folder: Path, config: DictConfig, overrides: list[str]) -> tuple[int, str, bool]:
    """(exit code, last lines, whether the sweep was asked to stop meanwhile) of the job's own process.

    Its output is shown as it comes and kept in output.log.
    """
    words = [word for word in overrides if not word.startswith("resume=")]
    words += [f"resume={config.resume or 'auto'}", f"hydra.run.dir={_quoted(folder)}"]
    command = [sys.executable, str(Path(sys.argv[0]).resolve()), *words]
    stopped = False

    def pass_on(number, frame):
        nonlocal stopped
        stopped = True
        process.send_signal(number)

    with open(folder / "output.log", "wb") as output:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        before = {number: signal.signal(number, pass_on) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            for line in process.stdout:
                output.write(line)
                sys.stdout.buffer.write(line)
                sys.stdout.flush()
            code = process.wait()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
    with open(folder / "output.log", "rb") as output:
        output.seek(0, os.SEEK_END)
        output.seek(max(0, output.tell() - 4096))
        return code, output.read().decode(errors="replace"), stopped


def _quoted(path: Path) -> str:
    return '"' + str(path).replace('"', '\\"') + '"'


def _reason(folder: Path, code: int, last_words: str) -> str:
    summary = read_json(folder / "summary.json") or {}
    if summary.get("reason"):
        return summary["reason"]
    lines = [line.strip() for line in last_words.splitlines() if line.strip()]
    said = f"; its last line: {lines[-1]}" if lines else ""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}{said}"
    return f"exit code {code}{said}"


class VerdictTable(Callback):
    """Hydra callback: when all jobs of a sweep have ended, compare them. Exits with 1 if any of them failed."""

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        self.begin = time.time() - 1  # file systems round their times

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        folder = Path(config.hydra.sweep.dir)
        rows = comparison.compare(folder, since=self.begin)
        comparison.write(rows, folder)
        comparison.show(rows, folder)
        if any(row["status"] != "done" for row in rows):
            sys.exit(1)
