"""The terminal: a progress bar with the last window's figures, or one plain line per window elsewhere."""

import logging

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from vitkernels.training.loggers.base import NullLogger

log = logging.getLogger("vitkernels")


class ConsoleLogger(NullLogger):
    """Show each log window to whoever watches the run."""

    def __init__(self, total_steps: int, first_step: int = 0):
        self._total = total_steps
        self._progress = _progress_bar(total_steps, first_step)

    def window(self, step: int, text: str, brief: str) -> None:
        if self._progress is not None:
            self._progress.update(self._progress.task_ids[0], completed=step, description=brief)
        else:
            log.info("step %d/%d  %s", step, self._total, text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


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
    bar.start()  # until stopped, it redirects sys.stdout and sys.stderr to print above itself
    return bar
