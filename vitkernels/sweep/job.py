"""`python train.py -m ...`: each job in a process of its own, and one verdict table at the end.

A kernel that faults takes its process with it (on a GPU it poisons the whole CUDA context), so jobs never share one.
"""

import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitkernels.errors import UsageError
from vitkernels.sweep import slots, verdict
from vitkernels.training.run_dir import (
    circumstances,
    differences,
    find_done,
    is_done,
    read_json,
    read_results,
    write_json,
)
from vitkernels.training.signals import EXIT_INTERRUPTED

log = logging.getLogger(__name__)

_TOO_LONG_TO_REPEAT = 900  # seconds: what ran for longer is a training, and not a measurement of step times


def arguments(argv: list[str]) -> list[str]:
    """The command line with a folder for its sweep: the same sweep gets the same folder, so it can be continued.

    Folders are named by what is swept (runs/sweeps/attn-1a2b3c4d/attn=sdpa); an own hydra.sweep.dir is left alone.
    Raises UsageError where the jobs are for Slurm and it is not here.
    """
    if not {"-m", "--multirun"} & set(argv):
        return argv
    slurm = {"hydra/launcher=slurm", "hydra/launcher=submitit_slurm"} & set(argv)
    if slurm and shutil.which("srun") is None:
        raise UsageError(
            f"{slurm.pop()} needs Slurm's srun and sbatch, and srun is not on the PATH here: start it on a machine of "
            "the cluster, or use hydra/launcher=local on this one"
        )
    words = [word for word in argv[1:] if "=" in word and not word.startswith("-")]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException:
        return argv  # Hydra reports it better
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    fixed = [o.key_or_group for o in overrides if not o.is_sweep_override()]
    added = []
    sweeps = swept or any(o.key_or_group == "hydra/sweeper" for o in overrides)  # which may bring its own parameters
    if sweeps and fixed:
        added.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    if not any(word.split("=")[0] == "hydra.sweep.dir" for word in words):
        deciding = sorted(word for word in words if not word.startswith(("sweep.", "resume=")))
        digest = hashlib.sha256("\0".join(deciding).encode()).hexdigest()[:8]
        name = "-".join([*(key.replace("/", ".") for key in swept), digest])
        added.append(f"hydra.sweep.dir=runs/sweeps/{name}")
    # Hydra reads no settings on both sides of -m, or of another option.
    return [argv[0], "-m", *added, *(word for word in argv[1:] if word not in ("-m", "--multirun"))]


def is_sweep_job() -> bool:
    return HydraConfig.get().mode == RunMode.MULTIRUN


def run_job(config: DictConfig) -> float | list[float] | None:
    """Run one job of a sweep as `python train.py <its overrides>`; returns what a sweeper may optimise.

    A failure is logged at once and noted in the job's folder for the verdict table; it never raises, so that the
    sweep goes on. A job that is already done with the same configuration is skipped, unless it was short and something
    has changed since that its step times may depend on, such as a kernel's code. One that is preempted goes back into
    the launcher's queue, where the launcher has one (submitit), and resumes when its turn comes.
    """
    slots.check(config.sweep.slots)
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    variant = hydra.job.override_dirname or "default"
    now = circumstances(config)
    job = {"num": hydra.job.num, "variant": variant, "overrides": list(hydra.overrides.task), "circumstances": now}
    if _is_measured(folder, config, variant, now):
        then = (read_json(folder / "job.json") or {}).get("circumstances")  # what its figures are of, if it is known
        write_json(folder / "job.json", {**job, "circumstances": then, "status": "done"})
        return _objective(folder, config)
    if not is_done(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # an earlier failure's reason is not this one's
    # What stays if nobody is left to write anything else.
    write_json(folder / "job.json", {**job, "status": "failed", "reason": "it has not ended: killed, or still running"})
    with slots.slot(config.sweep.slots) as environment:
        environment |= slots.shared_caches(config.sweep.compile_cache)
        code, last_words, stopped = _run_in_own_process(folder, config, list(hydra.overrides.task), environment)
    if code == EXIT_INTERRUPTED or (stopped and code != 0):
        write_json(folder / "job.json", {**job, "status": "failed", "reason": "interrupted"})
    elif code != 0:
        reason = _reason(folder, code, last_words)
        write_json(folder / "job.json", {**job, "status": "failed", "reason": reason})
        log.error("%s failed: %s", variant, reason)
    else:
        write_json(folder / "job.json", {**job, "status": "done"})
    if stopped or code == EXIT_INTERRUPTED:
        _back_into_the_queue(variant, stopped)
        log.error("interrupted; the same command continues the sweep")
        sys.exit(EXIT_INTERRUPTED)
    return _objective(folder, config) if code == 0 else None


def _preemption_signal() -> signal.Signals | None:
    """The signal by which a launcher's job manager announces the end and is told to run the job again; None: no such.

    submitit handles SIGUSR2, or SIGUSR1 where SUBMITIT_PREEMPT_SIGNAL says so.
    """
    return next((s for s in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(s))), None)


def _back_into_the_queue(variant: str, stopped: signal.Signals | None) -> None:
    """Let the launcher requeue the job that is called this; returns where it cannot, or where somebody said stop."""
    preemption = _preemption_signal()
    if preemption is not None and stopped in (None, preemption):
        log.warning("%s: preempted, back into the queue", variant)
        signal.raise_signal(preemption)  # submitit's handler, which ends this process


def _is_measured(folder: Path, config: DictConfig, variant: str, now: dict) -> bool:
    """Whether the folder has this job's results as they would be `now`; what else it has of it makes room."""
    if config.sweep.rerun:
        _clear(folder)
    if find_done(folder, config) is None:
        return False
    then = (read_json(folder / "job.json") or {}).get("circumstances")
    changed = ["nothing says with which code"] if then is None else differences(then, now)
    results = read_results(folder)
    took_long = (results.get("seconds") or 0) > _TOO_LONG_TO_REPEAT
    if not changed or took_long:
        but = f"; took too long to be repeated unasked, though {'; '.join(changed)}" if changed else ""
        again = "sweep.rerun=true runs it again"
        log.info("%s: done before, skipped (at commit %s%s; %s)", variant, results.get("git_commit"), but, again)
        return True
    log.info("%s: done before, but measured again: %s", variant, "; ".join(changed))
    if config.mode == "train":
        _set_aside(folder)
    else:  # which may lie beside the run that it is of
        (folder / "eval.json").unlink()
    return False


def _objective(folder: Path, config: DictConfig) -> float | list[float] | None:
    results = OmegaConf.create(read_results(folder))
    if isinstance(config.sweep.objective, str):
        value = OmegaConf.select(results, config.sweep.objective)
        return None if value is None else float(value)
    values = [OmegaConf.select(results, name) for name in config.sweep.objective]
    return None if None in values else [float(value) for value in values]


def _clear(folder: Path) -> None:
    """Remove an earlier attempt's results, but not Hydra's files of this one."""
    for path in _results_in(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _set_aside(folder: Path) -> None:
    """Move an earlier attempt's results into `before`, in place of what lies there: they may be a long training's."""
    before = folder / "before"
    if before.exists():
        shutil.rmtree(before)
    results = [path for path in _results_in(folder) if path.name != "job.json"]  # by which a sweep's table knows jobs
    before.mkdir()
    for path in results:
        path.rename(before / path.name)
    log.info("its results so far are in %s", before)


def _results_in(folder: Path) -> list[Path]:
    """All but Hydra's files, the logs and the lock."""
    return [p for p in folder.iterdir() if p.name not in (".hydra", ".lock") and p.suffix != ".log"]


def _run_in_own_process(
    folder: Path, config: DictConfig, overrides: list[str], environment: dict[str, str]
) -> tuple[int, str, signal.Signals | None]:
    """(exit code, last lines, the signal that asked for a stop meanwhile or None) of the job's own process.

    Its output is shown as it comes and kept in output.log.
    """
    words = [word for word in overrides if not word.startswith("resume=")]
    words += [f"resume={quoted(config.resume or 'auto')}", f"hydra.run.dir={quoted(folder)}"]
    command = [sys.executable, str(_script()), *words]
    preemption = _preemption_signal()
    stopped = None

    def pass_on(number, frame):
        nonlocal stopped
        stopped = signal.Signals(number)
        process.send_signal(signal.SIGTERM if number == preemption else number)

    with open(folder / "output.log", "ab") as output:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        handled = {signal.SIGTERM, signal.SIGINT} | ({preemption} - {None})
        before = {number: signal.signal(number, pass_on) for number in handled}
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


def _script() -> Path:
    """train.py: the one beside the configuration, for in a launcher's process sys.argv names the launcher."""
    sources = HydraConfig.get().runtime.config_sources
    return Path(next(source.path for source in sources if source.provider == "main")).parent / "train.py"


def quoted(path: Path | str) -> str:
    """As a value of Hydra's command line, whatever characters are in it."""
    # Backslashes escape a quotation mark and each other before one, and are themselves elsewhere.
    escaped = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + ('\\"' if match[2] else ""), str(path))
    return f'"{escaped}"'


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

    of_this_process: "VerdictTable | None" = None  # the table that is due when the sweep ends in whatever way

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        self.folder = Path(config.hydra.sweep.dir)
        # By the clock of the file system, to which jobs on other machines write too.
        marker = self.folder / ".started"
        self.folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
        self.begin = marker.stat().st_mtime
        slots.remember_gpus()
        VerdictTable.of_this_process = self

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        VerdictTable.of_this_process = None
        rows = verdict.compare(self.folder, since=self.begin)
        verdict.write(rows, self.folder)
        verdict.show(rows, self.folder)
        if any(row["status"] != "done" for row in rows):
            sys.exit(1)


def conclude(error: Exception) -> bool:
    """Make the table of a sweep whose launcher gave up, as submitit does when a job was killed; False: no job ran."""
    table = VerdictTable.of_this_process
    if table is None or not verdict.compare(table.folder, since=table.begin):
        return False
    log.error("the sweep ended early: %s; the same command continues it", (str(error).splitlines() or [repr(error)])[0])
    table.on_multirun_end(None)
    return True
