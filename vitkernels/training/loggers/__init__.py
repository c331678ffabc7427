"""Loggers of a run's metrics. A new one is one file here and one line in `run_loggers`."""

from pathlib import Path

from vitkernels.training.loggers.base import DiskGuard, LoggerGroup, MetricLogger, NullLogger
from vitkernels.training.loggers.console import ConsoleLogger
from vitkernels.training.loggers.json_lines import JsonLinesLogger
from vitkernels.training.loggers.tensorboard import TensorBoardLogger

__all__ = ["ConsoleLogger", "JsonLinesLogger", "LoggerGroup", "MetricLogger", "NullLogger", "run_loggers"]


def run_loggers(
    folder: Path,
    total_steps: int,
    first_step: int = 0,
    evaluates_first: bool = False,
    further: NullLogger | None = None,
) -> LoggerGroup:
    """Return the loggers of a run: metrics.jsonl, TensorBoard, the terminal, and a further one if given.

    A full or failing disk is logged once and does not end training: metrics.jsonl catches up when the disk recovers,
    and TensorBoard lacks the points of that time.

    Args:
        folder: the run's folder.
        total_steps: length of the run.
        first_step: steps taken before a resume; what was logged past it is dropped.
        evaluates_first: the run resumes with the evaluation of `first_step`, so an earlier one is dropped.
        further: such as remote.create returns.
    """
    guard = DiskGuard(folder)
    return LoggerGroup(
        ConsoleLogger(total_steps, first_step),  # first, so that the terminal is free when the others close
        JsonLinesLogger(folder, guard, first_step, evaluates_first),
        TensorBoardLogger(folder, guard, first_step),
        NullLogger() if further is None else further,
    )
