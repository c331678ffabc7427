"""Run a sweep (`python train.py -m ...`): each job in its own process, and one verdict table at the end.

A kernel that faults takes its process down and, on a GPU, poisons its CUDA context. Jobs therefore never share one.
"""

import contextlib
import hashlib
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from vitkernels.config import from_run
from vitkernels.config.location import conf_dir, train_command
from vitkernels.errors import EXIT_INTERRUPTED, UsageError
from vitkernels.files import read_json, write_json
from vitkernels.sweep import interleave, slots, verdict
from vitkernels.training.run_dir import circumstances, differences, find_complete, is_complete, read_results

log = logging.getLogger(__name__)

_LONG_RUN_S = 900  # longer runs train a model rather than measure step times, and are not repeated automatically


def add_sweep_folder(argv: list[str]) -> list[str]:
    """Return the command line with a folder for its sweep; without -m, return it unchanged.

    The same sweep always gets the same folder, so the same command continues it. The folder is named after the swept
    settings (runs/sweeps/attn-1a2b3c4d/attn=sdpa); an explicit hydra.sweep.dir is kept. Raises UsageError if the jobs
    need Slurm and this machine has no Slurm.
    """
    if not {"-m", "--multirun"} & set(argv):
        return argv
    _check_slurm(argv)
    words = [word for word in argv[1:] if "=" in word and not word.startswith("-")]
    try:
        overrides = OverridesParser.create().parse_overrides(words)
    except HydraException:
        return argv  # Hydra's own message is better
    swept = [o.key_or_group for o in overrides if o.is_sweep_override()]
    fixed = [o.key_or_group for o in overrides if not o.is_sweep_override()]
    added = []
    sweeps = swept or any(o.key_or_group == "hydra/sweeper" for o in overrides)  # a sweeper may sweep its own settings
    if sweeps and fixed:
        added.append(f"hydra.job.config.override_dirname.exclude_keys=[{','.join(fixed)}]")
    if not any(word.split("=")[0] == "hydra.sweep.dir" for word in words):
        identifying = sorted(word for word in words if not word.startswith(("sweep.", "resume=")))
        digest = hashlib.sha256("\0".join(identifying).encode()).hexdigest()[:8]
        name = "-".join([*(key.replace("/", ".") for key in swept), digest])
        added.append(f"hydra.sweep.dir=runs/sweeps/{name}")
    # Hydra does not parse overrides on both sides of an option such as -m.
    return [argv[0], "-m", *added, *(word for word in argv[1:] if word not in ("-m", "--multirun"))]


def _check_slurm(argv: list[str]) -> None:
    chosen = {"hydra/launcher=slurm", "hydra/launcher=submitit_slurm"} & set(argv)
    if chosen and shutil.which("srun") is None:
        raise UsageError(
            f"{chosen.pop()} needs Slurm's srun and sbatch, but srun is not on the PATH: run this on a machine of the "
            "cluster, or use hydra/launcher=local",
            code="sweep.no_slurm",
        )


def is_sweep_job() -> bool:
    """Return whether Hydra runs this process as a job of a multirun."""
    return HydraConfig.get().mode == RunMode.MULTIRUN


def run_job(config: DictConfig) -> float | list[float] | None:
    """Run one job of a sweep as `python train.py <its overrides>`; return the sweep's objective for the sweeper.

    A failure is logged, recorded in the job's folder for the verdict table, and never raised, so the sweep continues.
    A job that is already done with the same configuration is skipped. It is repeated only if it was short and something
    that its step times may depend on, such as a kernel's code, has changed since. A preempted job is requeued if the
    launcher supports that (submitit), and resumes when it runs again.
    """
    slots.check(config.sweep.slots)
    hydra = HydraConfig.get()
    with contextlib.suppress(UsageError):  # the job's process raises it again, and its failure is recorded
        config = from_run(config, hydra.overrides.task)
    folder = Path(hydra.runtime.output_dir)
    variant = hydra.job.override_dirname or "default"
    now = circumstances(_plain(config))
    job = {"num": hydra.job.num, "variant": variant, "overrides": list(hydra.overrides.task), "circumstances": now}
    if _can_skip(folder, config, variant, now):
        then = (read_json(folder / "job.json") or {}).get("circumstances")  # those of the recorded figures, if known
        write_json(folder / "job.json", {**job, "circumstances": then, "status": "done"})
        return _objective(folder, config)
    if not is_complete(folder):
        (folder / "summary.json").unlink(missing_ok=True)  # holds the reason of an earlier failure
    # This record remains if the process is killed before it can write another.
    write_json(folder / "job.json", {**job, "status": "failed", "reason": "did not finish: killed, or still running"})
    with slots.slot(config.sweep.slots) as environment:
        environment |= slots.shared_caches(config.sweep.compile_cache)
        code, last_output, stopped_by = _run_in_own_process(folder, config, list(hydra.overrides.task), environment)
    if code == EXIT_INTERRUPTED or (stopped_by and code != 0):
        write_json(folder / "job.json", {**job, "status": "failed", "reason": "interrupted"})
    elif code != 0:
        reason = _failure_reason(folder, code, last_output)
        write_json(folder / "job.json", {**job, "status": "failed", "reason": reason})
        log.error("%s failed: %s", variant, reason)
    else:
        write_json(folder / "job.json", {**job, "status": "done"})
    if stopped_by or code == EXIT_INTERRUPTED:
        _requeue_if_preempted(variant, stopped_by)
        log.error("interrupted; run the same command again to continue the sweep")
        sys.exit(EXIT_INTERRUPTED)
    return _objective(folder, config) if code == 0 else None


def _plain(config: DictConfig) -> dict:
    """Return the settings as a plain dictionary, as vitkernels.training takes them."""
    settings: Any = OmegaConf.to_container(config, resolve=True)
    return settings


def _preemption_signal() -> signal.Signals | None:
    """Return the signal by which the launcher's job manager announces a preemption, or None if there is none.

    submitit handles SIGUSR2, or SIGUSR1 if SUBMITIT_PREEMPT_SIGNAL says so.
    """
    return next((s for s in (signal.SIGUSR1, signal.SIGUSR2) if callable(signal.getsignal(s))), None)


def _requeue_if_preempted(variant: str, stopped_by: signal.Signals | None) -> None:
    """Let the launcher requeue a preempted job; return if the launcher cannot, or if a user stopped the job."""
    preemption = _preemption_signal()
    if preemption is not None and stopped_by in (None, preemption):
        log.warning("%s: preempted, requeueing", variant)
        signal.raise_signal(preemption)  # submitit's handler ends this process


def _can_skip(folder: Path, config: DictConfig, variant: str, now: dict) -> bool:
    """Return whether the folder holds valid results of this job under the circumstances `now`.

    Outdated results are moved out of the way.
    """
    if config.sweep.rerun:
        _clear(folder)
    if find_complete(folder, _plain(config)) is None:
        return False
    then = (read_json(folder / "job.json") or {}).get("circumstances")
    changed = ["the code that was measured is unknown"] if then is None else differences(then, now)
    results = read_results(folder)
    commit = results.get("git_commit")
    if not changed:
        log.info("%s: skipped, already done at commit %s; sweep.rerun=true repeats it", variant, commit)
        return True
    if (results.get("seconds") or 0) > _LONG_RUN_S:
        log.info(
            "%s: skipped, already done at commit %s. Changed since: %s. A run of more than %d minutes is repeated only "
            "with sweep.rerun=true",
            variant, commit, "; ".join(changed), _LONG_RUN_S // 60,
        )  # fmt: skip
        return True
    log.info("%s: already done, but measuring again: %s", variant, "; ".join(changed))
    if config.mode == "train":
        _set_aside(folder)
    else:  # the folder may also hold the training run that is evaluated
        (folder / "eval.json").unlink()
    return False


def _objective(folder: Path, config: DictConfig) -> float | list[float] | None:
    """Return the values of sweep.objective from the job's results; None if any is missing."""
    results = OmegaConf.create(read_results(folder))
    if isinstance(config.sweep.objective, str):
        value = OmegaConf.select(results, config.sweep.objective)
        return None if value is None else float(value)
    values = [OmegaConf.select(results, name) for name in config.sweep.objective]
    return None if None in values else [float(value) for value in values]


def _clear(folder: Path) -> None:
    """Delete the results of an earlier attempt, but not Hydra's files of this one."""
    for path in _result_files(folder):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _set_aside(folder: Path) -> None:
    """Move the results of an earlier attempt into `before`, replacing what `before` holds.

    They are kept because they may include trained weights.
    """
    before = folder / "before"
    if before.exists():
        shutil.rmtree(before)
    results = [path for path in _result_files(folder) if path.name != "job.json"]  # verdict.compare finds jobs by it
    before.mkdir()
    for path in results:
        path.rename(before / path.name)
    log.info("previous results moved to %s", before)


def _result_files(folder: Path) -> list[Path]:
    """Return everything in the folder except Hydra's files, the logs and the lock."""
    return [p for p in folder.iterdir() if p.name not in (".hydra", ".lock") and p.suffix != ".log"]


def _run_in_own_process(
    folder: Path, config: DictConfig, overrides: list[str], environment: dict[str, str]
) -> tuple[int, str, signal.Signals | None]:
    """Run the job in its own process; return its exit code, its last output, and the signal that stopped it or None.

    The output is shown as it arrives and appended to output.log. If either cannot be written, the job continues without
    it. The process has ended when this returns or raises.
    """
    words = [word for word in overrides if not word.startswith("resume=")]
    words += [f"resume={quoted(config.resume or 'auto')}", f"hydra.run.dir={quoted(folder)}"]
    command = [*train_command(), *words, *_configuration_options()]
    preemption = _preemption_signal()
    stopped_by: signal.Signals | None = None
    process: subprocess.Popen[bytes] | None = None
    early: list[int] = []  # signals that arrive before the process can get them

    def forward(number, frame):
        nonlocal stopped_by
        stopped_by = signal.Signals(number)
        number = signal.SIGTERM if number == preemption else number
        early.append(number) if process is None else process.send_signal(number)

    # Unbuffered, so that closing the file writes nothing, which could fail again.
    with open(folder / "output.log", "ab", buffering=0) as output:
        handled = {signal.SIGTERM, signal.SIGINT} | (set() if preemption is None else {preemption})
        before = {number: signal.signal(number, forward) for number in handled}
        try:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
            for number in early:
                process.send_signal(number)
            assert process.stdout is not None  # a pipe
            _copy(process.stdout, {"output.log": output.write, "the terminal": _show})
            code = process.wait()
        finally:
            if process is not None:
                _end(process)
            for number, handler in before.items():
                signal.signal(number, handler)
    with open(folder / "output.log", "rb") as written:
        written.seek(0, os.SEEK_END)
        written.seek(max(0, written.tell() - 4096))
        return code, written.read().decode(errors="replace"), stopped_by


def _copy(lines: Iterable[bytes], writers: dict[str, Callable[[bytes], object]]) -> None:
    """Pass each line to the writers, which are named for messages; leave out those that have failed."""
    for line in lines:
        for name, write in list(writers.items()):
            try:
                write(line)
            except OSError as error:
                del writers[name]
                log.error("the job's output can no longer be written to %s: %s; the job continues", name, error)


def _show(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.flush()


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs, since its slot goes to the next job."""
    assert process.stdout is not None  # a pipe
    process.stdout.close()  # or the process could wait forever for its output to be read
    if process.poll() is None:
        process.terminate()
        process.wait()


def _configuration_options() -> list[str]:
    """Return the options by which the job's process finds the configuration files of this sweep."""
    hydra = HydraConfig.get()
    paths = {source.provider: source.path for source in hydra.runtime.config_sources if source.schema == "file"}
    options = [f"--config-name={hydra.job.config_name}"] if hydra.job.config_name != "config" else []
    if "command-line" in paths:
        options.append(f"--config-dir={paths['command-line']}")
    if paths.get("main", str(conf_dir())) != str(conf_dir()):
        options.append(f"--config-path={paths['main']}")
    return options


def quoted(path: Path | str) -> str:
    """Return the path quoted as a value on Hydra's command line; any character is allowed in it."""
    # Backslashes are escapes only directly before a quotation mark, the closing one included.
    escaped = re.sub(r'(\\*)("|$)', lambda match: 2 * match[1] + ('\\"' if match[2] else ""), str(path))
    return f'"{escaped}"'


def _failure_reason(folder: Path, code: int, last_output: str) -> str:
    """Return the reason in the summary, or else the signal or exit code with the last line of output."""
    summary = read_json(folder / "summary.json") or {}
    if summary.get("reason"):
        return summary["reason"]
    lines = [line.strip() for line in last_output.splitlines() if line.strip()]
    last_line = f"; last line of output: {lines[-1]}" if lines else ""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}{last_line}"
    return f"exit code {code}{last_line}"


class VerdictTable(Callback):
    """Hydra callback that compares a sweep's jobs when all have ended; exits with 1 if any of them failed."""

    pending: "VerdictTable | None" = None  # the table still to be written by this process

    def on_multirun_start(self, config: DictConfig, **kwargs) -> None:
        """Record the start of the sweep, which separates its jobs from those of earlier sweeps in the folder."""
        self.folder = Path(config.hydra.sweep.dir)
        # The time comes from the file system because jobs on other machines write to it too.
        marker = self.folder / ".started"
        self.folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
        self.start_time = marker.stat().st_mtime
        self.settings = config.sweep
        self.launcher = str(OmegaConf.select(config, "hydra.launcher._target_") or "")
        slots.remember_gpus()
        VerdictTable.pending = self

    def on_multirun_end(self, config: DictConfig, **kwargs) -> None:
        """Time the variants in rounds, write and show the verdict."""
        VerdictTable.pending = None
        record = self._rounds(verdict.compare(self.folder, since=self.start_time))
        rows = verdict.compare(self.folder, since=self.start_time, record=record)
        verdict.write(rows, self.folder)
        verdict.show(rows, self.folder)
        if any(row["status"] != "done" for row in rows):
            sys.exit(1)

    def _rounds(self, rows: list[dict]) -> dict:
        """Return the record of the rounds, during which no other sweep of this user has the device."""
        # submitit's local launcher spreads jobs over the GPUs; the rounds run on one of them.
        local = "submitit" in self.launcher.lower() and "local" in self.launcher.lower()
        with slots.slot("gpus" if local else self.settings.slots) as environment:
            environment |= slots.shared_caches(self.settings.compile_cache)
            return interleave.time_variants(self.folder, rows, self.settings.rounds, self.launcher, environment)


def write_pending_verdict(error: Exception) -> bool:
    """Write the table of a sweep whose launcher failed, as submitit does if a job is killed; False if no job ran."""
    table = VerdictTable.pending
    if table is None or not verdict.compare(table.folder, since=table.start_time):
        return False
    first_line = (str(error).splitlines() or [repr(error)])[0]
    log.error("sweep ended early: %s; run the same command again to continue it", first_line)
    table.on_multirun_end(None)  # type: ignore[arg-type]  # it reads no configuration
    return True
