"""Where a run's figures go: metrics.jsonl, TensorBoard, and the terminal."""

import contextlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.highlighter import NullHighlighter
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter
from torch.utils.tensorboard.summary import hparams

from vitkernels.checkpoint.checkpoints import write_atomically
from vitkernels.training.history import StepRecord

log = logging.getLogger("vitkernels")


class RunLog:
    """The log of one run folder. After a resume at `first_step`, what was logged past it is taken back first, and
    with `evaluates_first` that step's evaluation too, for it will be made again.

    metrics.jsonl has a line per step and per evaluation, in full precision; TensorBoard has a point per window.
    On a terminal a progress bar shows the last window; elsewhere each window is a plain line.

    A disk that is full or fails is said once and does not end training: lines wait until they can be written, and
    TensorBoard lacks the points of that time.
    """

    def __init__(self, folder: Path, total_steps: int, first_step: int, evaluates_first: bool = False):
        self.path = folder / "metrics.jsonl"
        _drop_lines_after(self.path, first_step, evaluates_first)
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (closed by `close`)
        self._waiting = b""  # lines that are not in the file yet
        self._disk_fails = False
        self._board = SummaryWriter(str(folder), purge_step=first_step + 1)
        self._total = total_steps
        self._progress = _progress_bar(total_steps, first_step)

    def steps(self, records: list[StepRecord]) -> None:
        self._write([record.as_dict() for record in records])

    def evaluation(self, step: int, figures: dict) -> None:
        self._write([{"step": step, **figures}])

    def _write(self, lines: list[dict]) -> None:
        self._waiting += "".join(json.dumps(line) + "\n" for line in lines).encode()
        with self._tolerant():
            while self._waiting:
                written = self._file.write(self._waiting)
                self._waiting = self._waiting[written:]
            self._disk_fails = False

    @contextlib.contextmanager
    def _tolerant(self):
        try:
            yield
        except OSError as error:
            if not self._disk_fails:
                log.error("%s: %s; training goes on, metrics wait in memory", self.path.parent, error)
            self._disk_fails = True

    def sync(self) -> None:
        """Have the disk hold every line so far: a checkpoint must not be ahead of the log."""
        self._write([])
        with self._tolerant():
            os.fsync(self._file.fileno())
        self._on_board(SummaryWriter.flush)

    def _on_board(self, put: Callable[[SummaryWriter], None]) -> None:
        """put(board); on a board with a new file where the last one's could not be written."""
        if self._board is None and self._disk_fails:
            return
        with self._tolerant():
            board, self._board = self._board or SummaryWriter(str(self.path.parent)), None
            put(board)
            self._board = board

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        def put(board):
            for name, value in values.items():
                if value is not None:
                    board.add_scalar(name, value, step)

        self._on_board(put)

    def show(self, step: int, text: str, brief: str) -> None:
        """A window's figures: briefly beside the bar, or all of them as a line."""
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=brief)
        else:
            log.info("step %d/%d  %s", step, self._total, text)

    def card(self, title: str, text: str) -> None:
        self._on_board(lambda board: board.add_text(title, text))

    def hparams(self, parameters: dict, results: dict) -> None:
        """The run's settings and results for TensorBoard's HPARAMS tab, in the run's own folder."""
        results = {f"result/{name}": value for name, value in results.items() if value is not None}

        def put(board):
            for summary in hparams(parameters, results):
                board.file_writer.add_summary(summary)
            for name, value in results.items():
                board.add_scalar(name, value)

        self._on_board(put)

    def close(self) -> None:
        """Write out what is pending and give the terminal back; a second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
        if not self._file.closed:
            self._write([])
            if self._waiting:
                log.error("%s lacks its last %d lines", self.path, self._waiting.count(b"\n"))
            self._file.close()
            self._on_board(SummaryWriter.close)


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
