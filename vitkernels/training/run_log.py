"""Where a run's figures go: metrics.jsonl, TensorBoard, and the terminal."""

import json
import logging
import os
from pathlib import Path

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vitkernels.training.checkpoint import write_atomically
from vitkernels.training.history import StepRecord

log = logging.getLogger("vitkernels")


class RunLog:
    """The log of one run folder. After a resume at `first_step`, what was logged past it is taken back first, and
    with `evaluates_first` that step's evaluation too, for it will be made again.

    metrics.jsonl has a line per step and per evaluation, in full precision; TensorBoard has a point per window.
    On a terminal a progress bar shows the last window; elsewhere each window is a plain line.
    """

    def __init__(self, folder: Path, total_steps: int, first_step: int, evaluates_first: bool = False):
        self.path = folder / "metrics.jsonl"
        _drop_lines_after(self.path, first_step, evaluates_first)
        self._file = open(self.path, "a")  # noqa: SIM115 (closed by `close`)
        self._board = SummaryWriter(str(folder), purge_step=first_step + 1 if first_step else None)
        self._total = total_steps
        self._progress = _progress_bar(total_steps, first_step)

    def steps(self, records: list[StepRecord]) -> None:
        for record in records:
            self._file.write(json.dumps(record.as_dict()) + "\n")
        self._file.flush()

    def evaluation(self, step: int, figures: dict) -> None:
        self._file.write(json.dumps({"step": step, **figures}) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Have the disk hold every line so far: a checkpoint must not be ahead of the log."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._board.flush()

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        for name, value in values.items():
            if value is not None:
                self._board.add_scalar(name, value, step)

    def show(self, step: int, text: str, brief: str) -> None:
        """A window's figures: briefly beside the bar, or all of them as a line."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=brief)
        else:
            log.info("step %d/%d  %s", step, self._total, text)

    def card(self, title: str, text: str) -> None:
        self._board.add_text(title, text)

    def hparams(self, parameters: dict, results: dict) -> None:
        """The run's settings and results for TensorBoard's HPARAMS tab, in the run's own folder."""
        results = {f"result/{name}": value for name, value in results.items() if value is not None}
        for summary in hparams(parameters, results):
            self._board.file_writer.add_summary(summary)
        for name, value in results.items():
            self._board.add_scalar(name, value)

    def close(self) -> None:
        """Write out what is pending and give the terminal back; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
        self._file.close()
        self._board.close()


class NoLog:
    """The log of a process that is not the main one: takes everything and keeps nothing."""

    def __getattr__(self, name: str):
        return lambda *args, **keywords: None


def _drop_lines_after(path: Path, step: int, drop_evaluation: bool) -> None:
    """Keep the whole lines up to `step`; a torn last line goes too, and on demand that step's evaluation."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            content = json.loads(line)
            evaluated_here = drop_evaluation and content["step"] == step and "loss" not in content
            if content["step"] <= step and not evaluated_here:
                kept.append(line + "\n")
        except (json.JSONDecodeError, KeyError):
            continue
    write_atomically(path, lambda file: file.write("".join(kept).encode()))


def _progress_bar(total: int, completed: int) -> Progress | None:
    console = Console()
    if not console.is_terminal:
        return None
    bar = Progress(
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    )
    bar.add_task("", total=total, completed=completed)
    # Log lines must go above the bar and not through it.
    root = logging.getLogger()
    for handler in [h for h in root.handlers if type(h) is logging.StreamHandler]:
        root.removeHandler(handler)
        plain = {"show_time": False, "show_level": False, "show_path": False, "highlighter": NullHighlighter()}
        root.addHandler(RichHandler(handler.level, console, **plain))
    bar.start()
    return bar
