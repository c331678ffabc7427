"""The interface of a metric logger, and the logger that records nothing."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from vitkernels.training.metrics import StepRecord

log = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """Receive a run's figures at its log boundaries. Subclass NullLogger to implement only some of the methods."""

    def steps(self, records: list[StepRecord]) -> None:
        """Record every step since the last boundary, in order."""

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        """Record the figures of an evaluation after `step` steps, named val_top1, val_loss and so on."""

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        """Record scalars under names such as train/loss; None means not measured."""

    def window(self, step: int, text: str, brief: str) -> None:
        """Print a log window: `text` is a complete line, `brief` fits next to a progress bar."""

    def text(self, title: str, markdown: str) -> None:
        """Record a Markdown text, such as the run's settings."""

    def hparams(self, parameters: dict, results: dict) -> None:
        """Record the run's settings and results when it is complete."""

    def picture(self, step: int, title: str, path: Path) -> None:
        """Record a PNG file, such as the confusion matrix of the last evaluation."""

    def flush(self) -> None:
        """Write everything received so far to disk: a checkpoint must not be ahead of the log."""

    def close(self) -> None:
        """Release files and the terminal. A second call does nothing."""


class NullLogger:
    """Record nothing: the logger of all processes but the main one, and of steps without a run."""

    def steps(self, records: list[StepRecord]) -> None: ...

    def evaluation(self, step: int, figures: dict[str, float]) -> None: ...

    def scalars(self, step: int, values: dict[str, float | None]) -> None: ...

    def window(self, step: int, text: str, brief: str) -> None: ...

    def text(self, title: str, markdown: str) -> None: ...

    def hparams(self, parameters: dict, results: dict) -> None: ...

    def picture(self, step: int, title: str, path: Path) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class LoggerGroup(NullLogger):
    """Forward every call to several loggers, in order."""

    def __init__(self, *loggers: MetricLogger):
        self.loggers = loggers

    def steps(self, records: list[StepRecord]) -> None:
        for logger in self.loggers:
            logger.steps(records)

    def evaluation(self, step: int, figures: dict[str, float]) -> None:
        for logger in self.loggers:
            logger.evaluation(step, figures)

    def scalars(self, step: int, values: dict[str, float | None]) -> None:
        for logger in self.loggers:
            logger.scalars(step, values)

    def window(self, step: int, text: str, brief: str) -> None:
        for logger in self.loggers:
            logger.window(step, text, brief)

    def text(self, title: str, markdown: str) -> None:
        for logger in self.loggers:
            logger.text(title, markdown)

    def hparams(self, parameters: dict, results: dict) -> None:
        for logger in self.loggers:
            logger.hparams(parameters, results)

    def picture(self, step: int, title: str, path: Path) -> None:
        for logger in self.loggers:
            logger.picture(step, title, path)

    def flush(self) -> None:
        for logger in self.loggers:
            logger.flush()

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


class DiskGuard:
    """Keep training through a full or failing disk: the first error is logged, later ones until recovery are not."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.failing = False

    @contextlib.contextmanager
    def tolerate(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self.failing:
                log.error("%s: %s; training continues, metrics wait in memory", self.folder, error)
            self.failing = True
